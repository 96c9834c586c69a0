#!/usr/bin/env bash
# The front door: builds, demonstrates, tests and measures kvtier.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly go_need=1.26 python_need=3.11 venv=.venv lock=python/requirements.lock

usage() {
  cat <<'EOF'
usage: ./build.sh [command]

  (none)              build/libkvtier.so and build/kvtier
  demo [--json FILE]  a restart that keeps its cache: a real vLLM engine (CPU), then a
                      C++ engine whose ranks come back under other topologies
  test                every test: Go, race detector, C, C++, Python, real vLLM
  bench [--json FILE] [--part NAME]
                      a short run of the figures; NAME: copying, assemble, serving,
                      disk or engine
  clean               remove build/ and .venv/

Needs Go >= 1.26, a C and a C++ compiler, CMake, Python >= 3.11 (with venv).
demo and test make a virtual environment in .venv with the pinned vLLM (6 GB).
EOF
}

say() { printf '== %s\n' "$*"; }
die() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }

# at_least HAVE NEED: compares dotted versions.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

check_tools() {
  command -v go >/dev/null || die "Go >= $go_need is missing: see README.md, 'What it needs'"
  local have
  have=$(go env GOVERSION | sed 's/^go//; s/[^0-9.].*//')
  at_least "$have" "$go_need" || die "Go >= $go_need is needed, this is $have"
  command -v cc >/dev/null || die "a C compiler is missing (Debian: apt-get install build-essential)"
  command -v c++ >/dev/null || die "a C++ compiler is missing (Debian: apt-get install build-essential)"
}

build() {
  check_tools
  say "building build/libkvtier.so and build/kvtier"
  mkdir -p build
  local map=$PWD/capi/exports.map
  CGO_ENABLED=1 go build -trimpath -buildmode=c-shared \
    -ldflags "-s -w -extldflags '-Wl,--version-script=$map -Wl,-soname,libkvtier.so.1 -Wl,-z,now'" \
    -o build/libkvtier.so ./capi
  rm -f build/libkvtier.h # cgo's own header; include/kvtier.h is the contract
  ln -sf libkvtier.so build/libkvtier.so.1
  CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o build/kvtier ./cmd/kvtier
}

find_python() {
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python >= $python_need with venv is missing (Debian: apt-get install python3 python3-venv)"
}

# The environment is made anew when the list of packages has changed.
environment() {
  local stamp=$venv/kvtier-environment
  if ! cmp -s "$lock" "$stamp" 2>/dev/null; then
    say "making $venv with the pinned vLLM (about 6 GB, a few minutes)"
    "$(find_python)" -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9
    "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" --no-deps -r "$lock"
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation -e python
    cp "$lock" "$stamp"
  fi
}

# GoogleTest and CMake come from the distribution.
cpp_tools() {
  local missing=()
  command -v cmake >/dev/null || missing+=(cmake)
  [ -f /usr/include/gtest/gtest.h ] || [ -f /usr/local/include/gtest/gtest.h ] || missing+=(libgtest-dev)
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
  else
    die "missing for the C++ tests: ${missing[*]} (Debian: apt-get install ${missing[*]})"
  fi
}

test_all() {
  build
  environment
  cpp_tools
  say "go vet"
  go vet ./...
  say "go test"
  go test -timeout 15m ./...
  say "go test with invariants and the race detector"
  go test -race -tags invariants -timeout 20m ./...
  say "rank processes that end, stop or are slow at every step"
  go test -tags 'ranksteps invariants' -timeout 10m -parallel 6 -run 'EachStep|InsideACopy|BeforeItsGrants|Coordinator|PerChunk' ./tests/ranks
  say "C99 and C++17 programs"
  cmake -S . -B build/cmake -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
  cmake --build build/cmake >/dev/null
  ctest --test-dir build/cmake --output-on-failure
  say "pytest"
  "$venv/bin/python" -m pytest python/tests -q
}

case "${1:-build}" in
  build) build ;;
  demo) shift; build; environment; "$venv/bin/python" examples/demo/demo.py "$@" ;;
  test) test_all ;;
  bench) shift; build; environment; "$venv/bin/python" bench/bench.py "$@" ;;
  clean) rm -rf build "$venv" ;;
  help | -h | --help) usage ;;
  *) usage >&2; exit 2 ;;
esac
