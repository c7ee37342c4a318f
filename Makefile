# Everything a person types. `make` alone shows this list.
.DEFAULT_GOAL := help
.PHONY: help env loop image test lint evidence lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## make .venv: hash-locked packages, our patched wheels, samebits
	@scripts/make_env.sh

loop: env ## verl's trainer on this CPU, both arms; build/loop/bi{0,1}/receipt.json, report.html; IMAGE=: inside that image
	$(if $(IMAGE),scripts/in_image.sh $(IMAGE) build samebits run loop --out /out/loop --replace,\
		.venv/bin/samebits run loop --out build/loop --replace)

PROFILE ?= gpu
image: env ## compose the image, digest last; OUT= its folder (build/image/PROFILE), PROFILE=cpu the small one for tests
	@.venv/bin/samebits build image --profile $(PROFILE) --out $(or $(OUT),build/image/$(PROFILE))

test: env ## all tests but the full evidence rows
	.venv/bin/python -m pytest -m "not evidence"

lint: env ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check src tests
	.venv/bin/mypy

evidence: env ## the full evidence rows (long)
	.venv/bin/python -m pytest -m evidence

lock: ## make manifests/locks anew (needs uv)
	scripts/lock.sh

clean: ## remove what was built; the caches under build/cache stay
	find build -mindepth 1 -maxdepth 1 -not -name cache -exec rm -rf {} + 2>/dev/null || true
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
