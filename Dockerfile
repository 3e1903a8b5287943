# The launcher and training on CPUs; for GPUs: --build-arg TORCH_INDEX=https://pypi.org/simple
#   docker build -t allranks . && docker run --rm --shm-size=1g -v "$PWD:/work" allranks run demo.yaml
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch --index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE CHANGELOG.md /src/
COPY src /src/src
COPY docs/failures.md /src/docs/
COPY examples /src/examples
RUN pip install --no-cache-dir "/src[train]" && rm -r /src && useradd --create-home --uid 1000 user
USER user
WORKDIR /work
ENTRYPOINT ["allranks"]
CMD ["--help"]
