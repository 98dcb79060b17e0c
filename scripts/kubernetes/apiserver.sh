#!/usr/bin/env bash
# Finds a real kube-apiserver and kubectl, or builds them, and prints the folder they are in.
#
#   scripts/kubernetes/apiserver.sh          prints FOLDER; progress goes to standard error
#
# Looked for in this order: the folder that KUBE_BIN names, PATH, .cache/kubernetes/bin. If there is
# none, Debian's source of Kubernetes (1.20) is built into .cache/kubernetes with Debian's Go, which
# takes about 13 minutes on 2 cores, 2 GB of memory and 4 GB of disk. It needs Debian 12, a `deb`
# entry in apt's configuration, and root or sudo for three packages.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=$PWD/.cache/kubernetes
work=$cache/build
programs=(kube-apiserver kubectl)

say() { printf 'kubernetes: %s\n' "$*" >&2; }
fail() { printf 'kubernetes: %s\n' "$*" >&2; exit 1; }

# Whether a folder has all programs.
complete() {
  local program
  for program in "${programs[@]}"; do [ -x "$1/$program" ] || return 1; done
}

find_programs() {
  local found
  if [ -n "${KUBE_BIN:-}" ]; then
    complete "$KUBE_BIN" || fail "KUBE_BIN=$KUBE_BIN does not have all of: ${programs[*]}"
    echo "$KUBE_BIN"
    return
  fi
  if found=$(command -v kube-apiserver) && complete "$(dirname "$found")"; then
    dirname "$found"
    return
  fi
  complete "$cache/bin" && echo "$cache/bin"
}

# apt's configuration of this build alone: the archives that the machine uses, their sources too.
# Nothing outside of .cache changes.
configure_apt() {
  local lists=$work/apt/sources state=$work/apt/state file
  mkdir -p "$lists" "$state/lists/partial" "$work/apt/cache/archives/partial"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -f "$file" ] || continue
    sed -n 's/^deb \(.*\)/deb \1\ndeb-src \1/p' "$file" > "$lists/$(basename "$file" .list).list"
  done
  for file in /etc/apt/sources.list.d/*.sources; do
    [ -f "$file" ] || continue
    sed -e 's/^Types:.*/Types: deb deb-src/' "$file" > "$lists/$(basename "$file")"
  done
  grep -qs deb-src -r "$lists" || fail "apt's configuration has no deb entry to find sources with"
  apt=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$lists"
    -o "Dir::State::lists=$state/lists" -o "Dir::Cache=$work/apt/cache")
}

# Go, and the library whose vendored copy is too old for that Go.
install_packages() {
  local missing=() package sudo=
  for package in golang-1.19-go golang-github-modern-go-reflect2-dev dpkg-dev rsync; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || sudo=sudo
  say "installing ${missing[*]}"
  { $sudo apt-get update -qq && $sudo apt-get install -y -qq "${missing[@]}"; } >/dev/null ||
    fail "cannot install ${missing[*]}; they are in Debian 12"
}

fetch_source() {
  local reflect=/usr/share/gocode/src/github.com/modern-go/reflect2
  [ -f "$work/source/.ready" ] && return
  say "downloading Debian's source of Kubernetes"
  configure_apt
  # An archive that does not answer, or has no sources, does not matter if another one has it.
  apt-get "${apt[@]}" update -qq >&2 || say "not every archive has sources"
  (cd "$work" && apt-get "${apt[@]}" source -qq --download-only kubernetes >&2) ||
    fail "no archive of apt's configuration has the source package 'kubernetes'"
  rm -rf "$work/source"
  (cd "$work" && dpkg-source --no-check -x kubernetes_*.dsc source >&2)
  rm -rf "$work/source/vendor/github.com/modern-go/reflect2"
  cp -r "$reflect" "$work/source/vendor/github.com/modern-go/reflect2"
  touch "$work/source/.ready"
}

build() {
  local program version
  say "building ${programs[*]}: about 13 minutes on 2 cores; log: $work/build.log"
  version=$(sed -n 's/^Version: .*really\([0-9.]*\)-.*/\1/p' "$work"/kubernetes_*.dsc | head -n 1)
  (
    cd "$work/source"
    export PATH=/usr/lib/go-1.19/bin:$PATH HOME=$work GOCACHE=$work/gocache
    export CGO_ENABLED=0 GOFLAGS=-mod=vendor GOPROXY=off GOSUMDB=off
    make WHAT="$(printf 'cmd/%s ' "${programs[@]}")" GOLDFLAGS="-s -w" \
      KUBE_GIT_VERSION="v${version:-1.20.2}" KUBE_GIT_TREE_STATE=clean
  ) > "$work/build.log" 2>&1 || { tail -n 20 "$work/build.log" >&2; fail "the build failed"; }
  mkdir -p "$cache/bin"
  for program in "${programs[@]}"; do
    cp "$work/source/_output/bin/$program" "$cache/bin/$program.new"
    mv "$cache/bin/$program.new" "$cache/bin/$program"
  done
  rm -rf "$work"
}

find_programs && exit 0
[ -z "${KUBE_BIN:-}" ] || exit 1
command -v apt-get >/dev/null || fail "no kube-apiserver: put it and kubectl into PATH or KUBE_BIN"
mkdir -p "$work"
install_packages
fetch_source
build
echo "$cache/bin"
