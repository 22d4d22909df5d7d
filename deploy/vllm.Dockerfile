# vLLM's own image with Kedge's plug-in in it. From the repository's root:
#
#   docker build -f deploy/vllm.Dockerfile -t kedge-vllm .
#   docker run --gpus all --ipc host -p 8000:8000 kedge-vllm Qwen/Qwen3-8B
#
# What follows the image's name is what follows `vllm serve`. Another version of vLLM: --build-arg VLLM_TAG=v0.30.0.

ARG VLLM_TAG=v0.32.0

FROM python:3.12-slim AS build
WORKDIR /src
RUN pip install --no-cache-dir build==1.3.0
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m build --wheel --outdir /wheels

FROM vllm/vllm-openai:${VLLM_TAG}
COPY --from=build /wheels /wheels
COPY deploy/install_plugin.sh deploy/vllm_serve.sh /usr/local/bin/
RUN install_plugin.sh /wheels && rm -r /wheels /usr/local/bin/install_plugin.sh
ENV KEDGE_HOST_MEMORY=8GiB
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=15s --timeout=6s CMD \
    ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["vllm_serve.sh"]
