# An image of the server.  Wheels in wheels/ (of `pip download`) are taken before an index's.
#   docker build -t compilespec .
#   docker run -p 8000:8000 -e COMPILESPEC_API_KEY=... -v compilespec:/cache compilespec --model demo
FROM python:3.11-slim

RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/compilespec
COPY . .
RUN mkdir -p wheels && pip install --no-cache-dir --find-links wheels -c constraints.txt \
    torch numpy setuptools \
    && pip install --no-cache-dir --find-links wheels -c constraints.txt --no-build-isolation \
    '.[serve,guide,gguf]' \
    && useradd --create-home serve && mkdir /cache && chown serve /cache

USER serve
ENV COMPILESPEC_CACHE_DIR=/cache HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=3)"]
ENTRYPOINT ["compilespec", "serve", "--host", "0.0.0.0"]
