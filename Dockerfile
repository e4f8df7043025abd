# syntax=docker/dockerfile:1
# Calque and its embedded model; both images run `calque demo` if no other command is given.
#   docker build --target cpu -t calque:cpu .
#   docker run --rm --network none calque:cpu
#   docker build --target cuda -t calque:cuda .
#   docker run --rm --gpus all -v "$PWD:/data" --user "$(id -u):$(id -g)" calque:cuda align pairs.txt -o links

# The last version for which there is a build of fast_align (systran-align).
FROM python:3.11-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim AS base
# Nothing is downloaded at run time; HF_HUB_OFFLINE=0 allows names of models on the hub.
# USER is for torch.compile, which asks for a name even if --user gives a number without one.
ENV HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    USER=calque
RUN useradd --uid 1000 --create-home calque && mkdir /data && chown calque:calque /data
WORKDIR /data
ENTRYPOINT ["calque"]
CMD ["demo"]

FROM base AS cuda
# Triton compiles with gcc.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install -c /constraints.txt "$(echo /wheels/*.whl)[align,eval,mine,plots,serve]"
USER 1000
RUN --network=none calque demo

FROM base AS cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --extra-index-url https://download.pytorch.org/whl/cpu \
    -c /constraints.txt "$(echo /wheels/*.whl)[align,eval,mine,plots,serve]"
USER 1000
RUN --network=none calque demo
