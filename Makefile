# kvtier: make run is a tour of the program, make test is everything that must pass.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

# The steps of a target are in order, and go runs its own side by side.
.NOTPARALLEL:

BIN := $(CURDIR)/.bin

# What the checks need, pinned: the version is in the file's name, so another
# one is installed beside it.
STATICCHECK := $(BIN)/staticcheck@v0.8.2
GOFUMPT     := $(BIN)/gofumpt@v0.12.0
PROTOC_GO   := $(BIN)/protoc-gen-go@v1.36.12
PROTOC_GRPC := $(BIN)/protoc-gen-go-grpc@v1.6.2

.PHONY: build
build: ## build bin/kvtier
	CGO_ENABLED=0 go build -o bin/kvtier ./cmd/kvtier

.PHONY: run
run: build ## a tour: daemon, real trace, every byte verified, restart
	e2e/tour.sh bin/kvtier cmd/kvtier/testdata/conversation_small.jsonl.gz

# KVTIER_REQUIRE names what this machine must have (io_uring, loop): a test that
# misses it fails then. Without it the test is skipped, and the skip is printed.
.PHONY: test
test: lint proto-check test-plain test-race ## everything: lint, drift of generated code, all tests, with the race detector too

.PHONY: check
check: lint ## the quick part: lint, and the tests that are short, with the race detector
	CGO_ENABLED=1 go test -race -short -json $$(go list ./... | grep -v /e2e) | go run ./internal/gotest

.PHONY: test-plain
test-plain:
	CGO_ENABLED=0 go test -count=1 -timeout 10m -json ./... | go run ./internal/gotest

# The detector needs cgo and so a C compiler. The end-to-end tests build the
# daemon with the detector too.
.PHONY: test-race
test-race: $(if $(shell command -v gcc),,gcc)
	CGO_ENABLED=1 go test -race -count=1 -timeout 15m -json ./... | go run ./internal/gotest

.PHONY: soak
soak: ## long: the whole traces, many crashes, a minute of each fuzz target
	KVTIER_SOAK=1 CGO_ENABLED=0 go test -count=1 -timeout 2h ./e2e
	for package in $$(go list ./...); do \
		for target in $$(go test -list '^Fuzz' $$package | grep '^Fuzz' || true); do \
			CGO_ENABLED=0 go test -run '^$$' -fuzz "^$$target\$$" -fuzztime 1m $$package; \
		done; \
	done

.PHONY: bench
bench: build ## speed, as ratios to what the machine can do
	bin/kvtier bench dram nvme catalog match grpc restart

.PHONY: lint
lint: $(STATICCHECK) $(GOFUMPT)
	CGO_ENABLED=0 go vet ./...
	CGO_ENABLED=0 $(STATICCHECK) ./...
	@unformatted=$$($(GOFUMPT) -l .); \
	if [[ -n $$unformatted ]]; then echo "not formatted, run make fmt:"; echo "$$unformatted"; exit 1; fi

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
tools: $(STATICCHECK) $(GOFUMPT) $(PROTOC_GO) $(PROTOC_GRPC) protoc ## install what the other targets need, into .bin

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

# apt installs the Debian package $(2) when there is no program $(1).
apt = @command -v $(1) >/dev/null || { [[ $$(id -u) == 0 ]] && apt-get update -qq && apt-get install -y -qq $(2); } || \
	{ echo "needs $(1): install it (package $(2) on Debian)"; exit 1; }

.PHONY: protoc gcc
protoc:
	$(call apt,protoc,protobuf-compiler)
gcc:
	$(call apt,gcc,gcc libc6-dev)

.PHONY: clean
clean: ## remove what was built
	rm -rf bin $(BIN)

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
