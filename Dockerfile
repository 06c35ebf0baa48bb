# One image for scheduler, servers and workers.
#
#   docker build --tag paceline .
#   docker run --rm --volume "$PWD:/work" paceline paceline launch -n 2 -s 1 -- python train.py
#
# For GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" --constraint /tmp/constraints.txt /wheels/*.whl \
    && useradd --create-home --uid 10001 paceline \
    && mkdir /work && chown paceline /work
USER 10001
WORKDIR /work
CMD ["paceline", "--help"]
