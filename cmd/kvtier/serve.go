package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/policy/trace"
)

// serveFlags are the flags of serve, which are the keys of its configuration
// file too.
type serveFlags struct {
	config       string
	printConfig  bool
	data         string
	listen       []string
	xfer         string
	socket       string
	sharedMemory string
	dram         int64
	nvme         []string
	object       []string
	cluster      string
	objectMode   []string
	uploadBytes  int64
	uploadAge    time.Duration
	objectGrace  time.Duration
	high, low    float64
	policy       []string
	writeBudget  []string
	prefill      []string
	record       string
	recordBytes  int64
	grace        time.Duration
	prefetch     int64
	drainTimeout time.Duration
	metrics      string
	tlsCert      string
	tlsKey       string
	tlsClientCA  string
	tokenFile    string
	access       string
	insecure     bool
	posixEngine  string
	logLevel     string
	logFormat    string
}

// tokenEnv is the environment variable that holds the token: an argument would
// show in the list of processes.
const tokenEnv = "KVTIER_TOKEN"

// defaultSocket is the name of the socket for sessions in the data directory.
const defaultSocket = "session.sock"

// noNVMe is the value of --nvme that serves from DRAM only.
const noNVMe = "none"

func (f *serveFlags) add(fs *pflag.FlagSet) {
	fs.SortFlags = false
	fs.StringVar(&f.config, "config", "", "configuration `file` (YAML, keys are the names of these flags; flags win)")
	fs.BoolVar(&f.printConfig, "print-config", false, "print the configuration that would be used, and end")
	fs.StringVar(&f.data, "data", "", "data `directory` (default $XDG_DATA_HOME/kvtier or ~/.local/share/kvtier, /var/lib/kvtier with HOME and XDG_DATA_HOME unset)")
	f.listen = []string{"127.0.0.1:7070"}
	fs.Var(&listValue{p: &f.listen, kind: "address", check: checkEndpoint}, "listen", "HOST:PORT or unix:PATH to listen on; repeatable")
	f.xfer = "127.0.0.1:0"
	fs.Var(&addrValue{&f.xfer}, "xfer", "HOST:PORT to serve sessions on, by which workers move blocks; port 0 is a free one")
	fs.StringVar(&f.socket, "socket", "", "unix socket to serve sessions on for workers of this host (default "+defaultSocket+" in the data directory)")
	enumVar(fs, &f.sharedMemory, "shared-memory", "auto", "whether workers of this host may map the DRAM tier: auto, on or off", "auto", "on", "off")
	f.dram = wordSize
	fs.Var(&sizeValue{n: &f.dram, word: "auto"}, "dram", "size of the DRAM tier; auto is a quarter of the free memory")
	fs.Var(&listValue{p: &f.nvme, kind: "path=size", check: checkSlab}, "nvme",
		"slab of the NVMe tier, a file (made when absent) or a block device; repeatable; the word none serves from DRAM only\n(default: those that the data directory records, else a file in it)")
	fs.Var(&listValue{p: &f.object, kind: "URL", check: checkBucket}, "object",
		"bucket of the object tier, s3://BUCKET/PREFIX?endpoint=URL&path_style=true&region=R or azure://CONTAINER/PREFIX?endpoint=URL; repeatable, new objects go to the first that works\n(credentials come from the SDKs' environment variables and files; default: none)")
	fs.StringVar(&f.cluster, "cluster", "default", "`name` of the nodes that share the prefix of a bucket; the first that writes there claims it")
	fs.Var(&listValue{p: &f.objectMode, kind: "mode", check: checkObjectRule}, "object-mode",
		"GLOB=MODE[,KEEP]: when blocks of namespaces go into the bucket: back, when they leave the lowest local tier (the default), through, as soon as they were put, or off, never;\nand how long one is found there, such as 720h; repeatable, the first that matches counts")
	sizeVar(fs, &f.uploadBytes, "upload-bytes", 256<<20, "most bytes that may wait for the bucket in the local tiers; a full queue holds eviction back")
	fs.DurationVar(&f.uploadAge, "upload-age", 30*time.Second, "time that a block may wait for the bucket before its tier chooses anew what leaves")
	fs.DurationVar(&f.objectGrace, "object-grace", time.Hour, "age below which an object in a bucket is left alone by the sweep for orphans, for missing and for half-dead objects")
	shareVar(fs, &f.high, "high", 0.98, "used share of a tier above which it evicts")
	shareVar(fs, &f.low, "low", 0.96, "used share of a tier down to which it evicts")
	f.policy = []string{policy.Default}
	fs.Var(&listValue{p: &f.policy, kind: "policy", check: checkTierPolicy}, "policy",
		"which blocks leave a tier first: "+strings.Join(policy.Names(), ", ")+"; TIER=NAME for one tier; repeatable\n(kvtier policy set changes it until the daemon stops)")
	f.writeBudget = []string{noBudget}
	fs.Var(&listValue{p: &f.writeBudget, kind: "budget", check: checkBudget}, "write-budget",
		"[TIER[/GLOB]=]SIZE[,REQUESTS]: bytes a day that evictions may write to NVMe (or to the tier g3 or g4, for the namespaces that the glob matches, with so many requests to g4),\n2TB or 600TB/5y; what it is not enough for is dropped, blocks used once first; puts, pins and the stop write in any case, and count; repeatable, the word none writes all\n(kvtier policy set changes it until the daemon stops)")
	fs.Var(&listValue{p: &f.prefill, kind: "cost", check: checkPrefill}, "prefill",
		"GLOB=TOKEN[,POSITION]: what prefill costs the engines of namespaces, for matches and gets that ask what is worth loading:\na token at the beginning of a prompt, such as 33us, and how many ns more for each token before it; repeatable, the first that matches counts\n(of others it is learned from what engines report: kvtier policy show)")
	fs.StringVar(&f.record, "record", "", "`file` to record requests in, for kvtier sim: which blocks, by salted hashes; one that is there gets .1 behind its name (default off)")
	sizeVar(fs, &f.recordBytes, "record-bytes", 1<<30, "most bytes that the recording may take; the last half or more of it is kept")
	fs.DurationVar(&f.grace, "grace", time.Second, "time for which a block just committed is not dropped")
	sizeVar(fs, &f.prefetch, "prefetch-bytes", 256<<20, "most bytes that prefetches may have under way")
	fs.DurationVar(&f.drainTimeout, "drain-timeout", 30*time.Second, "time at shutdown to bring blocks from DRAM down to NVMe")
	fs.Var(&addrValue{&f.metrics}, "metrics", "HOST:PORT to serve Prometheus metrics, health and pprof on (default off)")
	fs.StringVar(&f.tlsCert, "tls-cert", "", "certificate `file` (PEM); with --tls-key")
	fs.StringVar(&f.tlsKey, "tls-key", "", "private key `file` (PEM)")
	fs.StringVar(&f.tlsClientCA, "tls-client-ca", "", "`file` of certificates (PEM) of which one must have signed a client's")
	fs.StringVar(&f.tokenFile, "token-file", "", "`file` with the token that clients must give (or set "+tokenEnv+")")
	fs.StringVar(&f.access, "access", "", "`file` with the list of who may connect and which namespaces each may read and write (JSON; instead of --token-file)")
	fs.BoolVar(&f.insecure, "insecure", false, "allow addresses that other machines reach without TLS and a token")
	enumVar(fs, &f.posixEngine, "posix-engine", "auto", "how files are read and written: auto, io_uring or goroutines", "auto", "io_uring", "goroutines")
	enumVar(fs, &f.logLevel, "log-level", "info", "debug, info, warn or error", "debug", "info", "warn", "error")
	enumVar(fs, &f.logFormat, "log-format", "text", "text or json", "text", "json")
}

func newServeCmd() *cobra.Command {
	f := &serveFlags{}
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon",
		Long: `Run the daemon. With no flags it keeps its data in a directory of the user's (in
/var/lib/kvtier when HOME and XDG_DATA_HOME are unset), takes a quarter of the
free memory for its DRAM tier and a tenth of the free space for a slab of its
NVMe tier, and listens on 127.0.0.1:7070.

Beside the gRPC of --listen it serves sessions, by which workers put and get blocks
in one call: on --xfer over TCP, and on --socket for workers of this host, who copy
in and out of the DRAM tier themselves where --shared-memory lets them. Clients are
told over gRPC where that is. TLS and the token apply to --xfer as to --listen; the
socket wants the token, and is open to this user only.

With --access each client is somebody: by its token or, on --socket without one, by
its user (then the socket is open to all users). The file lists them:

  {"identities": [
    {"name": "team-a", "token_sha256": "9f86d0...", "read": ["llama-*"], "write": ["llama-*"]},
    {"name": "local",  "uid": 1000, "read": ["*"], "write": ["*"]}]}

token_sha256 is what "printf %s TOKEN | sha256sum" prints; read and write are globs
over names of namespaces. "max_sessions" bounds the sessions that one has open at once
(256 without it), "max_leases" the leases that it holds, in sessions and over gRPC
(16384). The DRAM tier is mapped only by those who may read everything, for reading
only unless they may write everything, too. Only who may do both administers:
statistics, scrubs, the list of sessions.
Over gRPC, and so to the commands of this program, clients are known by token only.

With --object blocks that leave the lowest of the two tiers go into a bucket, several
to an object, and come back when they are asked for. What is there survives the host:
every node of the same --cluster may read it.

One line "ready ADDR" on standard output says that committed blocks are served.
Logs go to standard error. SIGTERM or SIGINT stops: blocks that are only in DRAM
go down to NVMe first, or without it to a bucket, and the exit code is 3 when not all
could. With --nvme none and no --object nothing is kept at a stop, and the exit code
is 0. A second signal kills.`,
		Example: `  kvtier serve
  kvtier serve --data /var/lib/kvtier --dram 64GiB --nvme /mnt/nvme0/slab=800GiB
  kvtier serve --object 's3://kv/prod?region=eu-west-1' --cluster prod
  kvtier serve --config kvtier.yaml --print-config`,
		Args: noArgs,
	}
	f.add(c.Flags())
	c.RunE = func(c *cobra.Command, _ []string) error {
		if f.config != "" {
			if err := loadConfig(f.config, c.Flags()); err != nil {
				return &exitError{code: exitUsage, err: err}
			}
		}
		p, err := f.plan(c.Context(), hostEnv())
		if err != nil {
			return err
		}
		if f.printConfig {
			f.data, f.dram = p.data, p.dram
			if f.socket != "" {
				f.socket = p.socket
			}
			for i, s := range p.slabs {
				f.nvme[i] = s.path + "=" + formatSize(s.bytes)
			}
			return formatConfig(c.OutOrStdout(), c.Flags(), p.note)
		}
		return serve(c.Context(), f, p, c.OutOrStdout(), newLogger(c.ErrOrStderr(), f.logLevel, f.logFormat))
	}
	return c
}

// slab is a slab that a flag names.
type slab struct {
	path  string
	bytes int64
}

// parseSlab reads PATH=SIZE.
func parseSlab(s string) (slab, error) {
	i := strings.LastIndexByte(s, '=')
	if i < 1 {
		return slab{}, fmt.Errorf("slab %q: want PATH=SIZE or none", s)
	}
	n, err := parseSize(s[i+1:])
	if err != nil {
		return slab{}, fmt.Errorf("slab %q: %w", s, err)
	}
	if n == 0 {
		return slab{}, fmt.Errorf("slab %q: size 0", s)
	}
	if strings.ContainsRune(s[:i], 0) {
		return slab{}, fmt.Errorf("slab %q: a byte of zero in the path", s)
	}
	path, err := filepath.Abs(s[:i])
	if err != nil {
		return slab{}, fmt.Errorf("slab %q: %w", s, err)
	}
	return slab{path, n}, nil
}

// checkSlab is parseSlab for a flag's check.
func checkSlab(s string) error {
	if s == noNVMe {
		return nil
	}
	_, err := parseSlab(s)
	return err
}

// servePlan is what the flags come to on this host.
type servePlan struct {
	data        string
	dram        int64
	dramFrom    string // why so much, "" when it was given
	noSlabs     bool
	slabs       []slab
	defaultSlab *slab  // for a new data directory
	slabNote    string // why there is no default slab
	endpoints   []endpoint
	xfer        endpoint
	policy      map[block.TierID]string // at start
	budgets     []block.WriteBudget
	prefill     prefills
	objectRules objectRules
	socket      string // absolute path; "": none
	socketNote  string // why there is none
	metrics     *endpoint
	security    security
}

// environment is what plan asks of the host.
type environment struct {
	getenv      func(string) string
	freeMemory  func() (n int64, what string, err error)
	totalMemory func() (n int64, what string, err error)
	freeSpace   func(dir string) (int64, error)
}

func hostEnv() environment {
	return environment{
		getenv:      os.Getenv,
		freeMemory:  func() (int64, string, error) { return freeMemory(os.DirFS("/")) },
		totalMemory: func() (int64, string, error) { return totalMemory(os.DirFS("/")) },
		freeSpace:   freeSpace,
	}
}

// plan checks the flags against each other and chooses what they leave open. It
// changes nothing on the host.
func (f *serveFlags) plan(ctx context.Context, env environment) (*servePlan, error) {
	p := &servePlan{}
	var err error
	if p.data, err = filepath.Abs(f.data); err != nil {
		return nil, usageErrorf("--data %s: %w", f.data, err)
	}
	if f.data == "" {
		p.data = defaultDataDir(env.getenv)
	}
	switch {
	case f.low > f.high:
		return nil, usageErrorf("--low %v is above --high %v", f.low, f.high)
	case f.low <= 0:
		return nil, usageErrorf("--low %v: want more than 0", f.low)
	case f.record != "" && f.recordBytes < trace.MinRecordBytes:
		return nil, usageErrorf("--record-bytes %s: want at least %s", formatSize(f.recordBytes), formatSize(trace.MinRecordBytes))
	case f.grace < 0:
		return nil, usageErrorf("--grace %v: want 0 or more", f.grace)
	case f.objectGrace <= 0:
		return nil, usageErrorf("--object-grace %v: want more than 0", f.objectGrace)
	case f.drainTimeout < 0:
		return nil, usageErrorf("--drain-timeout %v: want 0 or more", f.drainTimeout)
	}
	if err := checkCluster(f.cluster); err != nil {
		return nil, err
	}
	if err := p.planPolicy(f); err != nil {
		return nil, err
	}
	if err := p.planDRAM(f, env); err != nil {
		return nil, err
	}
	if err := p.planSlabs(f, env); err != nil {
		return nil, err
	}
	if err := p.planWrites(f); err != nil {
		return nil, err
	}
	if err := p.planObjects(f); err != nil {
		return nil, err
	}
	for _, s := range f.prefill {
		n, err := parseNamedPrefill(s)
		if err != nil {
			return nil, usageErrorf("--prefill: %w", err)
		}
		p.prefill = append(p.prefill, n)
	}
	if len(f.listen) == 0 {
		return nil, usageErrorf("--listen: no address")
	}
	for _, s := range f.listen {
		e, err := parseEndpoint(s)
		if err != nil {
			return nil, usageErrorf("--listen: %w", err)
		}
		p.endpoints = append(p.endpoints, e)
	}
	if p.xfer, err = parseEndpoint(f.xfer); err != nil {
		return nil, usageErrorf("--xfer: %w", err)
	}
	if err := p.planSocket(f); err != nil {
		return nil, err
	}
	if f.metrics != "" {
		p.metrics = &endpoint{"tcp", f.metrics}
	}
	if p.security, err = loadSecurity(f, env.getenv); err != nil {
		return nil, err
	}
	if err := p.checkReach(ctx, f); err != nil {
		return nil, err
	}
	return p, nil
}

// planPolicy chooses the policies that the tiers begin with: what is said of one tier
// goes before what is said of all.
func (p *servePlan) planPolicy(f *serveFlags) error {
	given := map[block.TierID]string{}
	for _, s := range f.policy {
		id, name, err := parseTierPolicy(s)
		if err != nil {
			return usageErrorf("--policy: %w", err)
		}
		if other, twice := given[id]; twice {
			what := "all tiers"
			if id != block.NoTier {
				what = id.String()
			}
			return usageErrorf("--policy: %s and %s for %s", other, name, what)
		}
		given[id] = name
	}
	p.policy = map[block.TierID]string{}
	for _, id := range []block.TierID{block.G2, block.G3} {
		switch {
		case given[id] != "":
			p.policy[id] = given[id]
		case given[block.NoTier] != "":
			p.policy[id] = given[block.NoTier]
		default:
			p.policy[id] = policy.Default
		}
	}
	return nil
}

func (p *servePlan) planDRAM(f *serveFlags, env environment) error {
	if f.dram != wordSize {
		if f.dram < minDRAM {
			return usageErrorf("--dram %s: want at least %s", formatSize(f.dram), formatSize(minDRAM))
		}
		// Where the memory cannot be found out, what was given counts.
		if n, what, err := env.totalMemory(); err == nil && f.dram > n {
			return usageErrorf("--dram %s: more than %s, %s (%d bytes)", formatSize(f.dram), what, formatSizeShort(n), n)
		}
		p.dram = f.dram
		return nil
	}
	free, what, err := env.freeMemory()
	if err != nil {
		return fmt.Errorf("%w; give --dram SIZE", err)
	}
	if p.dram, err = autoDRAM(free); err != nil {
		return err
	}
	p.dramFrom = fmt.Sprintf("chosen from %s, %s", what, formatSizeShort(free))
	return nil
}

func (p *servePlan) planSlabs(f *serveFlags, env environment) error {
	seen := map[string]bool{}
	for _, s := range f.nvme {
		if s == noNVMe {
			if len(f.nvme) > 1 {
				return usageErrorf("--nvme none excludes other --nvme values, have %s", strings.Join(f.nvme, ", "))
			}
			p.noSlabs = true
			return nil
		}
		sl, err := parseSlab(s)
		if err != nil {
			return usageErrorf("--nvme: %w", err)
		}
		if seen[sl.path] {
			return usageErrorf("--nvme: %s is given twice", sl.path)
		}
		seen[sl.path] = true
		p.slabs = append(p.slabs, sl)
	}
	if len(p.slabs) > 0 {
		return nil
	}
	free, err := env.freeSpace(p.data)
	if err != nil {
		return fmt.Errorf("find free space for --data: %w", err)
	}
	if n := autoSlab(free); n > 0 {
		p.defaultSlab = &slab{filepath.Join(p.data, "g3.slab"), n}
	} else {
		p.slabNote = fmt.Sprintf("the file system of %s has only %s free", p.data, formatSizeShort(free))
	}
	return nil
}

// planWrites chooses the write budgets. One of a tier that there will not be is refused.
func (p *servePlan) planWrites(f *serveFlags) error {
	all, err := parseBudgets(f.writeBudget)
	if err != nil {
		return usageErrorf("--write-budget: %w", err)
	}
	for i, b := range all {
		switch {
		case b.Bytes == 0 && b.Requests == 0:
			continue // no bound
		case b.Tier == block.G3 && p.noSlabs:
			return usageErrorf("--write-budget %s and --nvme none exclude each other: there is nothing to write to", f.writeBudget[i])
		case b.Tier == block.G4 && len(f.object) == 0:
			return usageErrorf("--write-budget %s without --object: there is no bucket to write to", f.writeBudget[i])
		}
		p.budgets = append(p.budgets, b)
	}
	return nil
}

// planSocket chooses the path of the socket for sessions. A default path that is too
// long for a socket is no reason not to serve.
func (p *servePlan) planSocket(f *serveFlags) error {
	path := filepath.Join(p.data, defaultSocket)
	if f.socket != "" {
		var err error
		if path, err = filepath.Abs(f.socket); err != nil {
			return usageErrorf("--socket %s: %w", f.socket, err)
		}
	}
	_, err := parseEndpoint("unix:" + path)
	switch {
	case err == nil:
		p.socket = path
	case f.socket != "":
		return usageErrorf("--socket %s: %w", f.socket, err)
	default:
		p.socketNote = fmt.Sprintf("%s has %d bytes, a socket's path at most %d; give --socket PATH", path, len(path), maxUnixPath)
	}
	return nil
}

// checkReach refuses addresses that other machines reach unless they are
// protected or it is said that they need not be.
func (p *servePlan) checkReach(ctx context.Context, f *serveFlags) error {
	if f.insecure {
		return nil
	}
	var missing []string
	if p.security.tls == nil {
		missing = append(missing, "TLS (--tls-cert and --tls-key)")
	}
	if p.security.token == "" && p.security.access == nil {
		missing = append(missing, "a token (--token-file or "+tokenEnv+")")
	}
	protected := len(missing) == 0
	for _, e := range p.endpoints {
		if !protected && !isLoopback(ctx, e) {
			return usageErrorf("--listen %s: other machines can reach this address; add %s, listen on 127.0.0.1 or unix:PATH, or allow it with --insecure",
				e, strings.Join(missing, " and "))
		}
	}
	if !protected && !isLoopback(ctx, p.xfer) {
		return usageErrorf("--xfer %s: other machines can reach this address; add %s, use 127.0.0.1, or allow it with --insecure",
			p.xfer, strings.Join(missing, " and "))
	}
	if p.metrics != nil && !isLoopback(ctx, *p.metrics) {
		return usageErrorf("--metrics %s: other machines can reach this address, and it has no protection; use 127.0.0.1, or allow it with --insecure", *p.metrics)
	}
	return nil
}

// note is the comment that --print-config puts behind a key.
func (p *servePlan) note(name string) string {
	switch {
	case name == "dram":
		return p.dramFrom
	case name == "socket" && p.socketNote != "":
		return "none: " + p.socketNote
	case name == "socket":
		return p.socket
	case name == "nvme" && p.defaultSlab != nil:
		return fmt.Sprintf("the slabs that the data directory records; when it is new, %s=%s", p.defaultSlab.path, formatSize(p.defaultSlab.bytes))
	case name == "nvme" && p.slabNote != "":
		return "the slabs that the data directory records; none for a new one: " + p.slabNote
	}
	return ""
}
