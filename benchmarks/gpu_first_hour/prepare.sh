#!/usr/bin/env bash
# Packs what a bare machine lacks (Linux x86-64, Python 3.12, torch and transformers, no network) into .gpukit/site.tar.xz.
#   bash benchmarks/gpu_first_hour/prepare.sh      in the root of the clone; 2 to 4 minutes on two cores
# .gpukit/ is ignored by git and must travel with the tree; `python -m benchmarks.gpu_first_hour` unpacks it where Ray is
# missing. Exits with 1 if the tree and .gpukit/ together are larger than LIMIT bytes. Needs pip with PyPI, xz and strip.
set -euo pipefail
LIMIT=${LIMIT:-67108864}
PYTHON=${PYTHON:-python3}
ROOT=$(git rev-parse --show-toplevel)
KIT=$ROOT/.gpukit
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
PACKAGES=(
  ray==2.60.0 diffusers==0.42.1 peft==0.21.2 hydra-core==1.3.8 omegaconf==2.3.1 xxhash==4.1.0
  rapidocr==3.10.0 RapidFuzz==3.14.6 pyclipper==1.4.0 shapely==2.2.0 colorlog==6.12.0
  jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1 importlib_metadata==10.2.0
  pytest-timeout==2.4.0 ftfy==6.3.1 wcwidth==0.9.4
)
PLATFORMS=()
for version in _2_28 _2_27 _2_24 _2_17 2014 1; do PLATFORMS+=(--platform "manylinux${version}_x86_64"); done

if [ "${1:-}" != --check ]; then
  mkdir -p "$KIT" "$WORK/wheels"
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${PLATFORMS[@]}" --dest "$WORK/wheels" "${PACKAGES[@]}"
  "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$WORK/wheels" antlr4-python3-runtime==4.9.3
  "$PYTHON" - "$WORK/wheels" "$WORK/site" "$ROOT" <<'PYTHON'
import os, pathlib, re, sys, zipfile
wheels, site, root = map(pathlib.Path, sys.argv[1:])
UNUSED = ("ray/jars/", "ray/dashboard/client/build/", "ray/rllib/", "ray/llm/", "ray/tune/", "ray/train/", "ray/serve/",
          "ray/data/", "ray/core/libjemalloc.so", "rapidocr/inference_engine/pytorch/",
          "rapidocr/inference_engine/tensorrt/", "rapidocr/models/PP-OCRv6_det", "rapidocr/models/ch_ppocr_mobile_v2.0_cls")
for wheel in sorted(wheels.glob("*.whl")):
    archive = zipfile.ZipFile(wheel)
    for info in archive.infolist():
        name = info.filename
        if info.is_dir() or name.startswith(UNUSED):
            continue
        if ".data/" in name:
            _, kind, name = name.split("/", 2)
            if kind not in ("purelib", "platlib"):
                continue
        target = site / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(archive.read(info))
        if (info.external_attr >> 16) & 0o111:
            target.chmod(0o755)
version = re.search(r'^version = "(.*)"', (root / "pyproject.toml").read_text(), re.M)[1]
info = site / f"async_flowrl-{version}.dist-info"  # so that importlib.metadata knows the package
info.mkdir()
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: async-flowrl\nVersion: {version}\n")
(site / "bin").mkdir(exist_ok=True)
for name, module in (("async-flowrl", "async_flowrl.cli.verbs"), ("ray", "ray.scripts.scripts")):
    (site / "bin" / name).write_text(f'#!/bin/sh\nexec python3 -m {module} "$@"\n')
    (site / "bin" / name).chmod(0o755)
PYTHON
  find "$WORK/site" -name '*.so' -exec strip --strip-unneeded {} +
  strip --strip-unneeded "$WORK"/site/ray/core/src/ray/{raylet/raylet,gcs/gcs_server}
  # Ray's three programs have much of their code in common: the dictionary must reach from one to the next.
  tar -C "$WORK/site" -cf - . | xz --x86 --lzma2=preset=6e,dict=96MiB > "$WORK/site.tar.xz"
  mv "$WORK/site.tar.xz" "$KIT/site.tar.xz"
fi
tree=$(cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | xargs -0 du -cb 2> /dev/null | awk '/total$/ {sum += $1} END {print sum}')
kit=$([ -d "$KIT" ] && du -sb "$KIT" | cut -f1 || echo 0)
echo "tree $tree + .gpukit $kit = $((tree + kit)) of $LIMIT bytes"
[ $((tree + kit)) -le "$LIMIT" ] || { echo "too large to travel"; exit 1; }
