#!/bin/bash
# The archive is unpacked, CMake finds it, four programs are built against it with
# the system's compiler: README's, a model of somebody's own and mnist, which run
# on two ranks, and docs/quickstart.md's, which has flags. Nothing of this build is
# used but libtorch.
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
for file in "${home}"/bin/* "${home}"/lib/*.so.*; do
  paths="$(readelf -d "${file}" | grep -E 'R(UN)?PATH' || true)"
  [[ -z "${paths}" || "${paths}" == *'[$ORIGIN/../lib]'* ]] ||
    { echo "${file}: ${paths}"; exit 1; }
done

# Every header that a page for users names is there.
headers="$(grep -hoE '\<(base|data|loader|nn)/[a-z_/]+\.h' "${@:4}" |
  sort -u)"
[[ "$(wc -l <<< "${headers}")" -ge 8 ]]
for header in ${headers}; do
  [[ -f "${home}/include/tessera/${header}" ]] ||
    { echo "${header} is not in the archive"; exit 1; }
done

# Elsewhere than where it was unpacked: nothing depends on the place.
mv "${home}" "${work}/moved"
home="${work}/moved"
cp -rL "${user}" "${home}/share/tessera/examples/user"

# configure EXAMPLE LIBTORCH
configure() {
  cmake -S "${home}/share/tessera/examples/$1" -B "${work}/$1" \
    -DCMAKE_CXX_COMPILER=/usr/bin/g++ -DCMAKE_PREFIX_PATH="${home}" \
    -DTORCH_ROOT="$2" > "${work}/cmake.log" 2>&1
}
builds=()
for example in minimal mnist quickstart user; do
  configure "${example}" "${torch}" || { cat "${work}/cmake.log"; exit 1; }
  cmake --build "${work}/${example}" &
  builds+=($!)
done
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

# By pkg-config it is linked, too.
read -ra libraries < <(PKG_CONFIG_PATH="${home}/lib/pkgconfig" \
  pkg-config --libs 'tessera >= 0.1')
g++ -o "${work}/by_pkg_config" "${work}"/user/CMakeFiles/user.dir/user.cc.o \
  -L"${torch}/lib" -Wl,--disable-new-dtags,-rpath,"${torch}/lib" \
  -Wl,--no-as-needed -ltorch_cpu -lc10 "${libraries[@]}" \
  -Wl,--allow-shlib-undefined

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
