# syntax=docker/dockerfile:1
# The image that deploy/chart and deploy/kubernetes name:
#
#   docker build -t atoll .                    GPUs and CPUs; about 75 MB compressed
#   docker build -t atoll-cpu --target cpu .   without NVRTC; about 30 MB compressed, 70 unpacked
#
# NVRTC, which compiles the kernels of a GPU backend, is 110 MB unpacked and 46 MB compressed.
# The driver library (libcuda) comes from the host: run with `--gpus all`, or let NVIDIA's device
# plugin for Kubernetes mount it.

FROM rust:1.95-slim-bookworm AS build
# Overrides rust-toolchain.toml, which would download a second toolchain.
ENV RUSTUP_TOOLCHAIN=1.95.0
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked && cp target/release/atoll /usr/local/bin/ && mkdir /empty

# NVRTC and the headers of kernels, in the versions that the tests use.
FROM python:3.13-slim-bookworm AS nvrtc
COPY tests/python/requirements.txt /tmp/
RUN grep '^nvidia-cuda-' /tmp/requirements.txt > /tmp/cuda.txt \
    && pip install --no-cache-dir --no-deps --target /wheels -r /tmp/cuda.txt \
    && mkdir -p /cuda/lib \
    && cp -r /wheels/nvidia/cu13/include /cuda/include \
    && cp /wheels/nvidia/cu13/lib/libnvrtc.so.* /wheels/nvidia/cu13/lib/libnvrtc-builtins.so.* \
        /cuda/lib/

FROM gcr.io/distroless/cc-debian12:nonroot AS cpu
COPY --from=build /usr/local/bin/atoll /usr/local/bin/atoll
# Compiled kernels and tuning results go to $XDG_CACHE_HOME/atoll. As a volume it stays writable
# under a read-only root. `atoll serve` keeps registered models only with --data-dir on a volume.
ENV XDG_CACHE_HOME=/var/cache
COPY --from=build --chown=65532:65532 /empty /var/cache/atoll
VOLUME /var/cache/atoll
# By number, so that Kubernetes can verify runAsNonRoot.
USER 65532:65532
# REST, gRPC, metrics. No HEALTHCHECK: Kubernetes probes /v2/health.
EXPOSE 8000 8001 8002
ENTRYPOINT ["/usr/local/bin/atoll"]

FROM cpu AS gpu
COPY --from=nvrtc /cuda /usr/local/cuda
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
