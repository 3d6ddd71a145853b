# syntax=docker/dockerfile:1
#
#   docker build --tag registry.example.com/pdproxy:0.1.0 .
#
# The image installs the compiled wheel. Building that wheel takes seven minutes, and hours on an emulated processor: build
# on each kind of processor, or install the interpreted wheel with --build-arg COMPILED=.
# All that the gateway needs has wheels for amd64 and arm64, the usual processor beside Ascend.
#
# Python 3.11 is what the test suite and the benchmark run with; with 3.12 a request took a tenth more.
#
# All packages have the versions and hashes of requirements/. Pin the base image by its digest where builds must repeat:
#
#   docker build --build-arg BASE=python:3.11-slim@sha256:… --tag registry.example.com/pdproxy:0.1.0 .
#
# This file was read, not built; its steps were run one by one, on a machine that has gcc.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements/runtime.txt requirements/build.txt requirements/
RUN python -m venv /opt/venv \
 && /opt/venv/bin/pip install --require-hashes -r requirements/runtime.txt \
 && python -m venv /opt/building \
 && /opt/building/bin/pip install --require-hashes -r requirements/runtime.txt -r requirements/build.txt
COPY pyproject.toml setup.py MANIFEST.in README.md CHANGELOG.md LICENSE ./
COPY proxy proxy
COPY scripts/lab scripts/lab

ARG COMPILED=1
RUN if [ -n "$COMPILED" ]; then \
      apt-get update --quiet \
   && apt-get install --quiet --yes --no-install-recommends gcc libc6-dev; \
    fi \
 && PDPROXY_COMPILE="$COMPILED" /opt/building/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/venv/bin/pip install --no-deps /wheels/*.whl

FROM ${BASE}
LABEL org.opencontainers.image.title="pdproxy" \
      org.opencontainers.image.description="A gateway for disaggregated prefill and decode" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY --from=build /opt/venv /opt/venv

# glibc gives the memory of a large request body back to the kernel when the request ends and asks for it again with the
# next one, page by page: handling a body of 2 MiB then costs twenty times the CPU. Keep it instead.
# 32 MiB is the largest mmap threshold glibc accepts.
ENV MALLOC_MMAP_THRESHOLD_=33554432 \
    MALLOC_TRIM_THRESHOLD_=268435456 \
    MALLOC_TOP_PAD_=67108864 \
    PATH=/opt/venv/bin:$PATH \
    PROXY_LISTEN__HOST=0.0.0.0 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# A number, so that Kubernetes can see that it is not root. Nothing below / needs to be writable.
USER 10001:10001
WORKDIR /
EXPOSE 1999
STOPSIGNAL SIGTERM
# Sees the environment and not the command line: to listen elsewhere, set PROXY_LISTEN__PORT rather than --port.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 CMD ["pdproxy", "health"]
ENTRYPOINT ["pdproxy"]
