#!/bin/bash
# The archive is unpacked, CMake finds it, two programs are built against it
# with the system's compiler, and run on two ranks: README's and a model of
# somebody's own. Nothing of this build is used but libtorch.
#
# usage: dist_test.sh ARCHIVE USER_FOLDER LIBRARY_OF_THIS_BUILD
set -euo pipefail

archive="$1" user="$2"
# libtorch is where this build's own library looks for it.
torch="$(readelf -d "$3" | sed -n 's/.*\[\(.*\)\]/\1/p' | tr ':' '\n' |
  grep -m1 '/torch/lib$')"
work="${TEST_TMPDIR}"

tar -xzf "${archive}" -C "${work}"
home="$(echo "${work}"/tessera-*-linux-x86_64)"

# No path of the build may be left in what is shipped.
for file in "${home}"/bin/* "${home}"/lib/*.so.*; do
  paths="$(readelf -d "${file}" | grep -E 'R(UN)?PATH' || true)"
  [[ -z "${paths}" || "${paths}" == *'[$ORIGIN/../lib]'* ]] ||
    { echo "${file}: ${paths}"; exit 1; }
done

# Elsewhere than where it was unpacked: nothing depends on the place.
mv "${home}" "${work}/moved"
home="${work}/moved"
mkdir "${work}/project"
cp -L "${user}"/* "${work}/project"
cp "${home}/share/tessera/examples/hello/hello.cc" "${work}/project"

cmake -S "${work}/project" -B "${work}/build" \
  -DCMAKE_CXX_COMPILER=/usr/bin/g++ -DCMAKE_PREFIX_PATH="${home}" \
  -DTORCH_ROOT="${torch%/lib}" > "${work}/cmake.log" ||
  { cat "${work}/cmake.log"; exit 1; }
cmake --build "${work}/build" --parallel 2

cd "${home}/share/tessera"
losses="$("${work}/build/hello" --world=2)"
echo "${losses}"
[[ "$(wc -l <<< "${losses}")" == 20 ]]
"${work}/build/user" "${work}/checkpoint" --world=2

"${home}/bin/tessera" config check examples/hello/zero3.json > /dev/null
PKG_CONFIG_PATH="${home}/lib/pkgconfig" pkg-config --exists 'tessera >= 0.1'

# What is missing is said.
if cmake -S "${work}/project" -B "${work}/none" -DCMAKE_PREFIX_PATH="${home}" \
  -DTORCH_ROOT="${work}" > "${work}/none.log" 2>&1; then
  echo "a folder without libtorch was taken for one"
  exit 1
fi
grep -q 'libtorch 2.11 was not found' "${work}/none.log"
