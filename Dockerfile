# Two images from one file: `control` (gateway, block manager), and `worker` with PyTorch and the
# native kernels.
#
#   docker build --target worker --build-arg PIP_EXTRA_INDEX_URL=... .
#
# PIP_EXTRA_INDEX_URL may name the index of PyTorch's CPU builds (see README.md, "Containers").

FROM python:3.11-slim-bookworm AS base
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1


# What both build from, so that the compiler's layer does not follow every change.
FROM scratch AS sources
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY deploy/constraints-cpu.txt deploy/no-cpu-torch.txt deploy/install.sh deploy/
COPY quire quire
COPY services services
COPY blockstore blockstore
COPY kernels kernels

FROM base AS build-control
RUN python -m venv /opt/quire
WORKDIR /src
COPY --from=sources /src ./
# It computes nothing: no native kernels, and so no compiler.
RUN QUIRE_NATIVE=OFF pip install --no-cache-dir .

FROM base AS build-worker
# hadolint ignore=DL3008  # whichever patch level the distribution's compiler has
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/quire
WORKDIR /src
COPY --from=sources /src ./
ARG PIP_EXTRA_INDEX_URL=""
RUN PIP_NO_CACHE_DIR=1 deploy/install.sh ".[worker]"


FROM base AS runtime
# One user in all images: they share the pool's files, which are private to it.
RUN groupadd --gid 10001 quire \
 && useradd --uid 10001 --gid quire --no-create-home --home-dir /tmp quire \
 && install --directory --owner=quire --group=quire --mode=0700 /run/quire /pools /weights \
 && install --directory /models/local
COPY quire/embedded /models/quire-embedded
WORKDIR /
USER 10001:10001

FROM runtime AS control
COPY --from=build-control /opt/quire /opt/quire

FROM runtime AS worker
COPY --from=build-worker /opt/quire /opt/quire
