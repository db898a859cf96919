# Two images from one file: `control` (gateway, block manager) without PyTorch, `worker` with it.
#
#   docker build --target worker --build-arg PIP_EXTRA_INDEX_URL=... .
#
# PIP_EXTRA_INDEX_URL may name the index of PyTorch's CPU builds (see README.md, "Containers").

FROM python:3.11-slim-bookworm AS base
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1


FROM base AS build-control
WORKDIR /src
RUN python -m venv /opt/quire
COPY pyproject.toml README.md LICENSE ./
COPY deploy/constraints-cpu.txt deploy/no-cpu-torch.txt deploy/install.sh deploy/
COPY quire quire
COPY services services
COPY blockstore blockstore
COPY kernels kernels
RUN pip install --no-cache-dir .

FROM build-control AS build-worker
ARG PIP_EXTRA_INDEX_URL=""
RUN PIP_NO_CACHE_DIR=1 deploy/install.sh ".[worker]"


FROM base AS runtime
# One user in all images: they share the pool's files, which are private to it.
RUN groupadd --gid 10001 quire \
 && useradd --uid 10001 --gid quire --no-create-home --home-dir /tmp quire \
 && install --directory --owner=quire --group=quire --mode=0700 /run/quire /pools \
 && install --directory /models/local
COPY quire/embedded /models/quire-embedded
WORKDIR /
USER 10001:10001

FROM runtime AS control
COPY --from=build-control /opt/quire /opt/quire

FROM runtime AS worker
COPY --from=build-worker /opt/quire /opt/quire
