#!/bin/bash
# The archive is unpacked, CMake finds it, four programs are built against it
# with the system's compiler: README's, mnist and a model of somebody's own, which
# run on two ranks, and docs/quickstart.md's, which has flags. The model's program has
# headers of its own that are called as some of ours. Usual mistakes get messages
# that say what to do. Nothing of this build is used but libtorch.
#
# usage: dist_test.sh ARCHIVE USER_FOLDER LIBRARY_OF_THIS_BUILD PAGE...
set -euo pipefail

archive="$1" user="$2"
# libtorch is where this build's own library looks for it.
torch="$(readelf -d "$3" | sed -n 's/.*\[\(.*\)\]/\1/p' | tr ':' '\n' |
  grep -m1 '/torch/lib$')"
torch="${torch%/lib}"
work="${TEST_TMPDIR}"

tar -xzf "${archive}" -C "${work}"
home="$(echo "${work}"/tessera-*-linux-x86_64)"

# No path of the build may be left in what is shipped.
apart="${home}/libexec/tessera"
for file in "${home}"/bin/* "${home}"/lib/*.so.* "${apart}"/{bin,lib}/*; do
  paths="$(readelf -d "${file}" | grep -E 'R(UN)?PATH' || true)"
  [[ -z "${paths}" || "${paths}" == *'[$ORIGIN/../lib]'* ]] ||
    { echo "${file}: ${paths}"; exit 1; }
done
# Programs find their libraries here, and not on this machine.
for program in "${home}"/bin/* "${apart}"/bin/*; do
  ldd "${program}" > "${work}/ldd.log"
  grep -q libabsl "${work}/ldd.log"
  ! grep -E 'lib(absl|proto|sentence|isal|uring)' "${work}/ldd.log" |
    grep -vF "${home}" || { echo "${program}"; exit 1; }
done

# SentencePiece has a protobuf of its own within, which must not get into users'
# programs.
[[ -n "$(ls "${apart}"/lib/libsentencepiece.so.*)" ]]
if ls "${home}/lib" | grep -i sentencepiece ||
  grep -ri sentencepiece "${home}/lib/pkgconfig" "${home}/lib/cmake"; then
  echo "SentencePiece is linked to users' programs"
  exit 1
fi

# Every header that a page for users names is there.
headers="$(grep -hoE '\<(base|data|loader|nn)/[a-z_/]+\.h' "${@:4}" |
  sort -u)"
[[ "$(wc -l <<< "${headers}")" -ge 8 ]]
for header in ${headers}; do
  [[ -f "${home}/include/tessera/${header}" ]] ||
    { echo "${header} is not in the archive"; exit 1; }
done

# Of include/ a program sees one name.
[[ "$(ls "${home}/include")" == tessera ]]
ls "${home}"/include/tessera/third_party/{absl,google/protobuf} > /dev/null

# Elsewhere than where it was unpacked: nothing depends on the place.
mv "${home}" "${work}/moved"
home="${work}/moved"
cp -rL "${user}" "${home}/share/tessera/examples/user"

# configure EXAMPLE LIBTORCH [OPTION...]
configure() {
  cmake -S "${home}/share/tessera/examples/$1" -B "${work}/$1" \
    -DCMAKE_CXX_COMPILER=/usr/bin/g++ -DCMAKE_PREFIX_PATH="${home}" \
    -DTORCH_ROOT="$2" "${@:3}" > "${work}/cmake.log" 2>&1
}
builds=()
for example in minimal mnist quickstart user; do
  # The files of mnist as one, which reads libtorch's headers once.
  joined=OFF
  [[ "${example}" != mnist ]] || joined=ON
  configure "${example}" "${torch}" -DCMAKE_UNITY_BUILD="${joined}" || { cat "${work}/cmake.log"; exit 1; }
  cmake --build "${work}/${example}" &
  builds+=($!)
done

# What a compiler says of mistakes.cc, with another abseil first on its path.
other="${work}/other/absl/base"
mkdir -p "${other}"
sed 's/\(INLINE_NAMESPACE_NAME\) debian3/\1 lts_other/' \
  "${home}/include/tessera/third_party/absl/base/options.h" > "${other}/options.h"
read -ra flags < <(PKG_CONFIG_PATH="${home}/lib/pkgconfig" \
  pkg-config --cflags 'tessera >= 0.1')
mistakes="${home}/share/tessera/examples/user/mistakes.cc"
if LC_ALL=C g++ -fsyntax-only -I"${work}/other" "${flags[@]}" \
  -isystem "${torch}/include" "${mistakes}" 2> "${work}/said.log"; then
  echo 'mistakes.cc compiles'
  exit 1
fi
while read -r text; do
  grep -qF "${text}" "${work}/said.log" ||
    { echo "no message: ${text}"; grep error: "${work}/said.log"; exit 1; }
done < <(sed -n 's|^// says: ||p' "${mistakes}"
  echo "another abseil's headers come before those of Tessera's archive")

for build in "${builds[@]}"; do wait "${build}"; done

cd "${home}/share/tessera"
losses="$("${work}/minimal/minimal" --world=2)"
echo "${losses}"
[[ "$(wc -l <<< "${losses}")" == 20 ]]
said="$("${work}/minimal/minimal" --wrld=2 2>&1 || true)"
[[ "${said}" == *'did you mean --world?'* ]]
"${work}/user/user" "${work}/checkpoint" --world=2
# From anywhere: its configuration is beside the program.
said="$(cd / && "${work}/mnist/mnist" --world=2 --images 100 --steps 2)"
[[ "${said}" == *'2/2  '*'test set: '*' of 20 images'* ]] ||
  { echo "${said}"; exit 1; }
[[ "$("${work}/quickstart/train" --help)" == *'--dir  '*'--world=N  '* ]]
"${home}/bin/tessera" config check examples/minimal/zero3.json > /dev/null
[[ "$("${home}/bin/tessera" --help)" == *'checkpoint verify'* ]]
# What needs libtorch says how it is found, and runs with it.
plan=(plan --config examples/minimal/zero3.json --model gpt:layers=1)
if "${home}/bin/tessera" "${plan[@]}" > "${work}/plan.log" 2>&1 ||
  ! grep -q 'LD_LIBRARY_PATH' "${work}/plan.log"; then
  cat "${work}/plan.log"
  exit 1
fi
LD_LIBRARY_PATH="${torch}/lib" "${home}/bin/tessera" "${plan[@]}" > /dev/null
bash -c '. "$1"; complete -p tessera' - \
  "${home}/share/bash-completion/completions/tessera" > /dev/null
head -n 1 "${home}/share/man/man1/tessera.1" | grep -q 'tessera manual'

# The tokenizer is found and reads a model, of five pieces.
/usr/bin/python3 - "${work}/five.model" << 'END'
import struct
import sys

def field(number, data):  # of protobuf's wire format: bytes, a float or an int
    if isinstance(data, float):
        return bytes([number << 3 | 5]) + struct.pack('<f', data)
    if isinstance(data, int):
        return bytes([number << 3, data])
    return bytes([number << 3 | 2, len(data)]) + data

UNKNOWN, CONTROL, NORMAL = 2, 3, 1
pieces = [('<unk>', UNKNOWN), ('<s>', CONTROL), ('</s>', CONTROL),
          ('\u2581hello', NORMAL), ('\u2581world', NORMAL)]
with open(sys.argv[1], 'wb') as file:
    for piece, kind in pieces:
        file.write(field(1, field(1, piece.encode()) + field(2, -1.0) +
                         field(3, kind)))
END
printf 'hello world hello' > "${work}/text"
"${home}/bin/tessera" tokenize --out "${work}/tokens" \
  --tokenizer "${work}/five.model" "${work}/text"
said="$("${home}/bin/tessera" tokenize --decode "${work}/tokens" \
  --tokenizer "${work}/five.model")"
[[ "${said}" == 'hello world hello' ]] || { echo "${said}"; exit 1; }

# By pkg-config it is linked, too.
read -ra libraries < <(PKG_CONFIG_PATH="${home}/lib/pkgconfig" \
  pkg-config --libs 'tessera >= 0.1')
g++ -o "${work}/by_pkg_config" "${work}"/user/CMakeFiles/user.dir/user.cc.o \
  -L"${torch}/lib" -Wl,--disable-new-dtags,-rpath,"${torch}/lib" \
  -Wl,--no-as-needed -ltorch_cpu -lc10 "${libraries[@]}" \
  -Wl,--allow-shlib-undefined

# Without the headers of abseil and protobuf.
minimal_flags="${work}/minimal/CMakeFiles/minimal.dir/flags.make"
grep -q "${home}/include .*${home}/include/tessera/third_party" "${minimal_flags}"
configure minimal "${torch}" -DTessera_THIRD_PARTY_HEADERS=OFF
grep -q "${home}/include" "${minimal_flags}"
if grep third_party "${minimal_flags}"; then exit 1; fi

# Nothing, and another version, in the place of libtorch: said, not found out by
# the linker.
# refuses FOLDER WORDS
refuses() {
  if configure minimal "$1"; then
    echo "$1 was taken for libtorch 2.11"
    exit 1
  fi
  tr -s ' \n' ' ' < "${work}/cmake.log" | grep -qF "$2" ||
    { cat "${work}/cmake.log"; exit 1; }
}
older="${work}/older"
mkdir -p "${older}/lib" "${older}/include/torch/headeronly"
touch "${older}/lib/libtorch_cpu.so"
printf '#define TORCH_VERSION_M%s\n' 'AJOR 2' 'INOR 10' \
  > "${older}/include/torch/headeronly/version.h"
refuses "${work}" "has no libtorch: pip install torch==2.11.0"
refuses "${older}" "has 2.10: pip install torch==2.11.0"
