#!/usr/bin/env bash
# Run a command in an image, without a network, its digest in SAMEBITS_IMAGE:
#   scripts/in_image.sh IMAGE OUT COMMAND...
#     IMAGE    the folder of `samebits build image`, or NAME@sha256:... that podman has or can pull
#     OUT      a folder of this machine, /out in the container
#   PODMAN="podman OPTION..."   default: podman with runc and cgroupfs, which need neither systemd nor a daemon
# E.g. scripts/in_image.sh build/image/cpu build/loop samebits run loop --out /out/loop
set -euo pipefail

fail() { echo "error: in_image: $*" >&2; exit 1; }
[ $# -ge 3 ] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }
image=$1 out=$2
shift 2
read -ra podman <<<"${PODMAN:-podman --runtime runc --cgroup-manager cgroupfs}"
command -v "${podman[0]}" >/dev/null || fail "there is no ${podman[0]}. Remedy: apt-get install podman runc."

if [ -d "$image" ]; then
    [ -f "$image/index.json" ] || fail "$image is no image. Remedy: samebits build image --out $image."
    digest=$(sed -nE 's/.*"manifests":\[\{[^]]*"digest":"(sha256:[0-9a-f]{64})".*/\1/p' "$image/index.json")
    [ -n "$digest" ] || fail "$image is no image. Remedy: samebits build image --out $image."
    reference=oci:$(cd "$image" && pwd)
elif [[ $image =~ @(sha256:[0-9a-f]{64})$ ]]; then
    digest=${BASH_REMATCH[1]} reference=docker://$image
else
    fail "$image is neither a folder nor NAME@sha256:... Remedy: name the image by its digest."
fi
known() { "${podman[@]}" images --no-trunc --digests --format '{{.Digest}} {{.ID}}' | sed -n "s/^$digest //p" | head -1; }
id=$(known)
if [ -z "$id" ]; then
    "${podman[@]}" pull --quiet ${TLS_VERIFY:+--tls-verify=$TLS_VERIFY} "$reference" >/dev/null
    id=$(known)
    [ -n "$id" ] || fail "podman has no image $digest after pulling $image. Remedy: see podman images --digests."
fi
mkdir -p "$out"
# Podman asks for more than a container's own root may: these suffice.
limits=(--ulimit nofile=16384:16384 --ulimit nproc=32768:32768)
exec "${podman[@]}" run --rm --network none --pids-limit=-1 --shm-size 2g "${limits[@]}" \
    --env "SAMEBITS_IMAGE=$digest" --env SAMEBITS_BUILD=/out --volume "$(cd "$out" && pwd):/out" "$id" "$@"
