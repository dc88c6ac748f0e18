package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

const (
	// maxCallDrain is the most that calls under way may take of the drain
	// timeout, so that the blocks keep the rest of it.
	maxCallDrain = 5 * time.Second
	// drainLogEvery is how often a drain tells how far it is.
	drainLogEvery = time.Second
)

// serve runs the daemon until ctx ends, and then stops it in order. What it
// builds depends on what was built before, and is closed in reverse.
func serve(ctx context.Context, f *serveFlags, p *servePlan, stdout io.Writer, log *slog.Logger) (err error) {
	closers := &closers{}
	defer func() { err = errors.Join(err, closers.close()) }()

	// Listening comes first: that an address is taken shows at once, not after a
	// long recovery. Nothing is answered before the store is there.
	listeners, err := listenAll(ctx, p.endpoints, closers)
	if err != nil {
		return err
	}
	ports, err := listenAll(ctx, []endpoint{p.xfer}, closers)
	if err != nil {
		return fmt.Errorf("--xfer: %w", err)
	}
	agent, files, err := newAgent(f.posixEngine, log)
	if err != nil {
		return err
	}
	closers.add(agent.Close)

	// The recording ends after the store, which tells it of requests.
	record, err := startRecord(f, closers, log)
	if err != nil {
		return err
	}
	places, err := openBuckets(ctx, f, closers)
	if err != nil {
		return err
	}
	st := newStatus()
	if p.metrics != nil {
		l, err := listen(ctx, *p.metrics)
		if err != nil {
			return fmt.Errorf("--metrics: %w", err)
		}
		reg := newRegistry(newStoreCollector(st.snapshot), newSessionCollector(st.sessionStats), newIdentityCollector(p.security.access.Usage), newXferCollector(agent.Stats, files.Stats), newObjectCollector(places))
		if record != nil {
			reg.MustRegister(newRecordCollector(record.Stats))
		}
		closers.add(startMonitor(l, monitorHandler(reg, log, st.ready), log).Close)
		log.Info("metrics listen", "address", boundTo(l).String())
	}

	begin := time.Now()
	options := p.options(f, agent, log)
	if record != nil {
		options.OnRequest = record.Request
	}
	for _, b := range places {
		options.Objects = append(options.Objects, bucketService{b})
	}
	options.Cluster = f.cluster
	store, err := tiers.Open(ctx, options)
	if err != nil {
		if ctx.Err() != nil {
			log.Info("stopped before the store was open")
			return nil
		}
		return err
	}
	closers.add(func() error {
		st.set(nil, nil, errStopping)
		return store.Close()
	})
	p.logOpened(log, store.Stats(), time.Since(begin))

	// The socket lies in the data directory as a rule, which the open store guards.
	socket, err := p.listenSocket(ctx, closers, log)
	if err != nil {
		return err
	}
	servers := newServers(store, p, ports[0], socket, log)
	st.set(store, servers.sessions, nil)
	failed := servers.start(listeners)
	closers.add(servers.close)
	if _, err := fmt.Fprintf(stdout, "ready %s\n", boundTo(listeners[0])); err != nil {
		return fmt.Errorf("print ready: %w", err)
	}

	select {
	case <-ctx.Done():
	case err = <-failed:
		log.Error("a listener failed, stopping", "err", err)
	}
	st.set(store, servers.sessions, errStopping)
	return errors.Join(err, stop(store, servers, p, f.drainTimeout, log))
}

// stop ends the calls under way and brings down what is only in DRAM, both
// within the timeout.
func stop(store *tiers.Store, servers *servers, p *servePlan, timeout time.Duration, log *slog.Logger) error {
	log.Info("stopping", "drain_timeout", timeout)
	// The command's context has ended already, hence a new one.
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	calls, cancelCalls := context.WithTimeout(ctx, min(maxCallDrain, timeout/4))
	defer cancelCalls()
	if err := servers.drain(calls); err != nil {
		log.Warn("calls were broken off", "err", err)
	}
	switch s := store.Stats(); {
	case hasTier(s, block.G3), hasTier(s, block.G4):
	default:
		log.Info("stopped; there is no NVMe tier, so no block was kept")
		return nil
	}
	last := time.Now()
	res, err := store.Drain(ctx, func(d tiers.DrainProgress) {
		if time.Since(last) >= drainLogEvery {
			last = time.Now()
			log.Info("draining", "done", d.Done, "total", d.Total, "bytes", d.Bytes)
		}
	})
	switch {
	case res.Left > 0:
		why := "there was no room"
		if ctx.Err() != nil {
			why = fmt.Sprintf("--drain-timeout %v was over", timeout)
		}
		if err != nil {
			why = err.Error()
		}
		gone := fmt.Sprintf("%d blocks that were only in DRAM are gone", res.Left)
		if res.Left == 1 {
			gone = "1 block that was only in DRAM is gone"
		}
		return &exitError{code: exitMiss, err: fmt.Errorf("stopped, but %s, %d were brought down: %s", gone, res.Kept, why)}
	case err != nil:
		return err
	}
	log.Info("stopped", "brought_down", res.Kept, "bytes", res.Bytes)
	return nil
}
