#!/usr/bin/env bash
# Makes the root file system of the image's `cpu` stage without a container engine, and runs the
# binary in it as the image does: not root, no capabilities, no new privileges, a read-only root,
# namespaces of its own.
#
#   scripts/image_root.sh make FOLDER [BINARY]      make it and print its size
#   scripts/image_root.sh run FOLDER ARGUMENT...    run atoll ARGUMENT... in it (needs root)
#
# gcr.io/distroless/cc-debian12 is what these Debian packages hold, without their documentation.
set -euo pipefail
packages=(base-files netbase tzdata ca-certificates libc6 libssl3 libgcc-s1 libgomp1 libstdc++6)
command=${1:?make or run} root=$(realpath -m "${2:?a folder}")
here=$(cd "$(dirname "$0")/.." && pwd)

make_root() {
  local binary=$1 work
  work=$(mktemp -d)
  trap 'rm -rf "$work"' RETURN
  mkdir -p "$root"
  (cd "$work" && apt-get download -qq "${packages[@]}" 2>/dev/null)
  for package in "$work"/*.deb; do dpkg-deb --extract "$package" "$root"; done
  rm -rf "$root"/usr/share/{doc,man,lintian,locale,bug} "$root"/usr/share/info
  # Distroless keeps no tools: neither a shell nor anything else to execute.
  rm -rf "$root"/{bin,sbin,usr/bin,usr/sbin,etc/update-motd.d}
  mkdir -p "$root"/{etc/ssl/certs,proc,dev,tmp,models,data,home/nonroot,usr/local/bin} \
    "$root"/var/cache/atoll
  find "$root"/usr/share/ca-certificates -name '*.crt' -exec cat {} + \
    > "$root"/etc/ssl/certs/ca-certificates.crt
  printf '%s\n' root:x:0:0:root:/root:/sbin/nologin \
    nonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin > "$root"/etc/passwd
  printf 'root:x:0:\nnonroot:x:65532:\n' > "$root"/etc/group
  install -m 755 "$binary" "$root"/usr/local/bin/atoll
  chown 65532:65532 "$root"/var/cache/atoll "$root"/data 2>/dev/null || true
  printf '%d MiB, of which the binary %d\n' \
    "$(du -sm --apparent-size "$root" | cut -f1)" "$(du -m --apparent-size "$binary" | cut -f1)"
}

# Volumes are /models, read-only, and /data and /var/cache/atoll.
run_inside() {
  shift 2
  exec unshare --mount --pid --ipc --uts --fork --kill-child bash -euc '
    root=$1; shift
    mount --make-rprivate /
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for device in null zero urandom; do
      touch "$root/dev/$device"
      mount --bind "/dev/$device" "$root/dev/$device"
    done
    for volume in data var/cache/atoll; do mount --bind "$root/$volume" "$root/$volume"; done
    mount -o remount,bind,ro "$root"
    cd "$root"
    # What changing the root and the user needs ends with the change of the user.
    exec env -i PATH=/usr/local/bin:/usr/bin:/usr/sbin:/sbin:/bin XDG_CACHE_HOME=/var/cache \
      setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+sys_chroot,+setuid,+setgid \
      chroot --userspec=65532:65532 --groups= "$root" /usr/local/bin/atoll "$@"
  ' bash "$root" "$@"
}

case $command in
  make) make_root "${3:-$here/target/release/atoll}" ;;
  run) run_inside "$@" ;;
  *) echo "usage: $0 make|run FOLDER ..." >&2; exit 2 ;;
esac
