# kvtier: make run is a tour of the program, make test is everything that must pass.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

# The steps of a target are in order, and go runs its own side by side.
.NOTPARALLEL:

BIN := $(CURDIR)/.bin

PYTHON ?= python3
VENV   := $(BIN)/venv-$(notdir $(PYTHON))

# What the checks need, pinned: the version is in the file's name, so another
# one is installed beside it.
STATICCHECK := $(BIN)/staticcheck@v0.8.2
GOFUMPT     := $(BIN)/gofumpt@v0.12.0
PROTOC_GO   := $(BIN)/protoc-gen-go@v1.36.12
PROTOC_GRPC := $(BIN)/protoc-gen-go-grpc@v1.6.2
# Servers that tests talk to. Azurite's packages are pinned by its lock file.
VERSITYGW   := $(BIN)/versitygw@v1.8.0
AZURITE     := $(BIN)/azurite@3.37.0/node_modules/.bin/azurite-blob

.PHONY: build
build: ## build bin/kvtier
	CGO_ENABLED=0 go build -o bin/kvtier ./cmd/kvtier

.PHONY: run
run: build ## a tour: daemon, real trace, every byte verified, restart
	e2e/tour.sh bin/kvtier cmd/kvtier/testdata/conversation_small.jsonl.gz

# KVTIER_REQUIRE names what this machine must have (io_uring, loop, root, ipv6, cgroup, versitygw, azurite, python, vllm): a
# test that misses it fails then. Without it the test is skipped, and the skip is
# printed. Engines are tested on a machine without a person, and where vllm is named.
with_engines := $(CI)$(findstring vllm,$(KVTIER_REQUIRE))
.PHONY: test
test: lint proto-check servers $(VENV)/made test-plain test-race python-test $(if $(with_engines),engines) ## everything: lint, drift of generated code, all tests, with the race detector too

.PHONY: check
check: lint ## the quick part: lint, and the tests that are short, with the race detector
	CGO_ENABLED=1 $(gotest) go test -race -tags invariants -short -json $$(go list ./... | grep -v /e2e)

# Of two that run side by side the longest begin first. What go test vets lint has vetted.
flags = -count=1 -vet=off -json
packages = ./e2e ./tiers ./...

gotest = go run ./internal/gotest
# A test that fails for want of processor time would refuse a change that is good. Whatever
# speaks of a race, a crash, bytes that are wrong or lost, or a call without an end is never
# run again, and make soak runs nothing again.
again = -again 3
again_python = $(if $(KVTIER_SOAK),,--reruns 2 --rerun-except '(?i)\b(wrong|lost|leak|corrupt|hang|hung|stuck)' -rR)

.PHONY: test-plain
test-plain:
	CGO_ENABLED=0 $(gotest) $(again) go test -timeout 20m $(flags) $(packages)

# The detector needs cgo and so a C compiler. The tag adds checks that are too
# dear to be made always. The end-to-end tests build the daemon likewise. Where
# nothing is concurrent there is nothing to detect.
.PHONY: test-race
test-race: $(if $(shell command -v gcc),,gcc)
	CGO_ENABLED=1 $(gotest) $(again) go test -race -tags invariants -timeout 30m $(flags) ./e2e ./tiers $(concurrent)

concurrent = $$(go list -f '{{.Dir}}' ./... | while read -r dir; do \
	if grep -qE '^\s*go |\.Go\(|^\s*"sync(/atomic)?"$$|\.Parallel\(' "$$dir"/*.go; then echo "$$dir"; fi; done)

# The engines' packages take 3 GB and are the same for every checkout of this user.
ENGINES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvtier/engines

# pytest runs those tests $(2) that need an engine, with the packages of $(1) before the environment's.
# A process imports these in half the time when one before it has kept the bytecode.
pytest = cd python/tests/engines && KVTIER_BIN=$(CURDIR)/bin/kvtier PYTHONPATH=$(1)$(CURDIR)/python \
	PYTHONDONTWRITEBYTECODE= $(ENGINES)/venv/bin/python -m pytest -q $(again_python) -p no:cacheprovider -W ignore::DeprecationWarning $(2)

.PHONY: engines
engines: build gcc python ## tests with real engines (vLLM on CPUs), in an environment that it makes from the package index
	$(PYTHON) python/tests/engines/install.py $(ENGINES)
	$(call pytest,,.)
	$(call pytest,$(ENGINES)/vllm-0.33:,test_tier_classes.py)

.PHONY: soak
soak: ## long: whole traces, a thousand crashes and seeds, ten thousand lost connections, half an hour of load, engines where make test has them, a minute of each fuzz target
	KVTIER_SOAK=1 CGO_ENABLED=0 $(gotest) go test -count=1 -timeout 5h -json ./e2e ./tiers ./api/... ./xfer/... ./backends/...
	KVTIER_SOAK=1 $(MAKE) python-test
	$(if $(with_engines),KVTIER_SOAK=1 $(MAKE) engines)
	for package in $$(go list ./...); do \
		for target in $$(go test -list '^Fuzz' $$package | grep '^Fuzz' || true); do \
			CGO_ENABLED=0 go test -run '^$$' -fuzz "^$$target\$$" -fuzztime 1m $$package; \
		done; \
	done

.PHONY: bench
bench: build $(VENV)/made ## speed, as ratios to what the machine can do
	PYTHONPATH=$(CURDIR)/python bin/kvtier bench all --python $(VENV)/bin/python

# The environment is made anew when the package's metadata changes.
$(VENV)/made: python/pyproject.toml | python
	rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check pytest pytest-rerunfailures mypy numpy xxhash hatchling
	touch $@

.PHONY: wheel
wheel: build $(VENV)/made ## build python/dist/*.whl, the Python package with the program
	mkdir -p python/build && cp bin/kvtier python/build/kvtier
	rm -f python/dist/*.whl
	$(VENV)/bin/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w python/dist ./python

.PHONY: python-test
python-test: wheel ## types and tests of the Python package, against a real daemon and as a wheel
	cd python && $(VENV)/bin/mypy
	cd python && KVTIER_BIN=$(CURDIR)/bin/kvtier KVTIER_WHEEL="$$(echo dist/*.whl)" $(VENV)/bin/python -m pytest -q $(again_python) --ignore tests/engines

.PHONY: lint
lint: $(STATICCHECK) $(GOFUMPT)
	CGO_ENABLED=0 go vet ./...
	CGO_ENABLED=0 go vet -tags invariants $(tagged)
	CGO_ENABLED=0 $(STATICCHECK) ./...
	CGO_ENABLED=0 $(STATICCHECK) -tags invariants $(tagged)
	@unformatted=$$($(GOFUMPT) -l .); \
	if [[ -n $$unformatted ]]; then echo "not formatted, run make fmt:"; echo "$$unformatted"; exit 1; fi

# tagged are the packages that have files which a plain build leaves out.
tagged = $$(go list -f '{{if .IgnoredGoFiles}}{{.ImportPath}}{{end}}' ./...)

.PHONY: fmt
fmt: $(GOFUMPT) ## format the code
	$(GOFUMPT) -w .

# protogen writes the code of api/kvtier.proto below the directory $(1).
protogen = protoc -I api --plugin=protoc-gen-go=$(PROTOC_GO) --plugin=protoc-gen-go-grpc=$(PROTOC_GRPC) \
	--go_out=$(1) --go_opt=paths=source_relative --go-grpc_out=$(1) --go-grpc_opt=paths=source_relative kvtier.proto

.PHONY: proto
proto: protoc $(PROTOC_GO) $(PROTOC_GRPC) ## generate api/kvtierpb
	$(call protogen,api/kvtierpb)

# The files say which protoc wrote them. Another one is no drift.
.PHONY: proto-check
proto-check: protoc $(PROTOC_GO) $(PROTOC_GRPC)
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && $(call protogen,"$$dir") && \
	if ! diff -r -I '^// .*protoc  ' api/kvtierpb "$$dir"; then echo "api/kvtierpb is not what api/kvtier.proto says, run make proto"; exit 1; fi

.PHONY: tools
tools: $(STATICCHECK) $(GOFUMPT) $(PROTOC_GO) $(PROTOC_GRPC) protoc servers ## install what the other targets need, into .bin

# Azurite takes 360 MB and needs node: it is installed where npm is, or where it is required.
.PHONY: servers
servers: $(VERSITYGW) $(if $(findstring root,$(KVTIER_REQUIRE)),ip) $(if $(or $(shell command -v npm),$(findstring azurite,$(KVTIER_REQUIRE))),$(AZURITE)) ## install the servers that tests start, into .bin

$(AZURITE): internal/servers/azurite/package-lock.json | npm
	rm -rf $(BIN)/new && mkdir -p $(BIN)/new && cp internal/servers/azurite/package*.json $(BIN)/new
	npm ci --prefix $(BIN)/new --ignore-scripts --no-audit --no-fund --loglevel=error
	rm -rf $(BIN)/azurite@* && mv $(BIN)/new $(BIN)/azurite@3.37.0 && touch $@

# install puts the program of the Go package $(1) in place of a target.
install = GOBIN=$(BIN)/new CGO_ENABLED=0 go install $(1)@$(lastword $(subst @, ,$@)) && mv $(BIN)/new/$(notdir $(1)) $@ && rmdir $(BIN)/new

$(STATICCHECK):
	$(call install,honnef.co/go/tools/cmd/staticcheck)
$(GOFUMPT):
	$(call install,mvdan.cc/gofumpt)
$(PROTOC_GO):
	$(call install,google.golang.org/protobuf/cmd/protoc-gen-go)
$(PROTOC_GRPC):
	$(call install,google.golang.org/grpc/cmd/protoc-gen-go-grpc)
$(VERSITYGW):
	$(call install,github.com/versity/versitygw/cmd/versitygw)

# apt installs the Debian package $(2) when there is no program $(1).
apt = @command -v $(1) >/dev/null || { [[ $$(id -u) == 0 ]] && apt-get update -qq && apt-get install -y -qq $(2); } || \
	{ echo "needs $(1): install it (package $(2) on Debian)"; exit 1; }

.PHONY: protoc gcc python npm ip
protoc:
	$(call apt,protoc,protobuf-compiler)
npm:
	$(call apt,npm,nodejs npm)
gcc:
	$(call apt,gcc,gcc libc6-dev)
ip:
	$(call apt,ip,iproute2)
# Debian's python3 can make an environment only with python3-venv.
python:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [[ $$(id -u) == 0 ]] && apt-get update -qq && apt-get install -y -qq python3 python3-venv; } || \
	{ echo "needs $(PYTHON) with the module ensurepip: install it (package python3-venv on Debian)"; exit 1; }

.PHONY: clean
clean: ## remove what was built
	rm -rf bin $(BIN) python/build python/dist

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
