package main

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

const closeTime = time.Minute

// shelf is a disk tier with one namespace of whole chunks.
type shelf struct {
	root  *tier.Root
	store *tier.Store
	disk  *tier.Disk
}

func namespace(bytes int) *chunk.Namespace {
	return &chunk.Namespace{
		Model: "bench", ChunkTokens: 256,
		Groups: []chunk.Group{{Kind: chunk.GroupBlob, TokensPerRow: 256, Regions: []chunk.Region{
			{Bytes: bytes, Component: "target", Layer: -1, Head: -1, Name: "blob"}}}},
	}
}

func openShelf(dir string, bytes int) (*shelf, error) {
	r, err := tier.OpenRoot(dir, tier.RootOptions{AllowNetwork: true})
	if err != nil {
		return nil, err
	}
	ok, holder, err := r.TryLock()
	if err == nil && !ok {
		err = fmt.Errorf("%s is led by %s", dir, holder)
	}
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	s, err := tier.OpenStore(r, tier.StoreOptions{CapBytes: 1 << 40, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	d, err := s.Namespace(namespace(bytes))
	h := &shelf{r, s, d}
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

func (h *shelf) close() error { return errors.Join(h.store.Close(closeTime), h.root.Close()) }

func key(n int) chunk.Key { return sha256.Sum256(binary.LittleEndian.AppendUint64(nil, uint64(n))) }

// write stores chunks and waits until all are on disk. The checksum is taken here, as
// it is when a chunk is complete in DRAM.
func (h *shelf) write(buffers [][]byte) error { return h.writeAs(0, buffers) }

// writeAs is write with keys that are counted from first on.
func (h *shelf) writeAs(first int, buffers [][]byte) error {
	done := make(chan error, len(buffers))
	queued := 0
	var err error
	for n, b := range buffers {
		w := tier.WriteJob{Key: key(first + n), Payload: b, Hash: chunk.HashPayload(b), Done: func(err error) { done <- err }}
		if !h.disk.Write(w) {
			err = fmt.Errorf("the write of chunk %d was not taken: %+v", n, h.store.Stats().Dropped)
			break
		}
		queued++
	}
	for range queued {
		err = errors.Join(err, <-done)
	}
	return err
}

// read brings chunks back, checked.
func (h *shelf) read(buffers [][]byte) error {
	done := make(chan error, len(buffers))
	for n, b := range buffers {
		h.disk.Read(key(n), b, func(r tier.ReadResult) { done <- r.Err })
	}
	var err error
	for range buffers {
		err = errors.Join(err, <-done)
	}
	return err
}

// pages gives buffers for direct I/O, filled with noise.
func pages(count, bytes int) (buffers [][]byte, free func(), err error) {
	noise := rand.NewChaCha8([32]byte{1})
	free = func() {
		for _, b := range buffers {
			_ = sys.FreePages(b)
		}
	}
	for range count {
		b, err := sys.NewPages(bytes)
		if err != nil {
			free()
			return nil, nil, err
		}
		buffers = append(buffers, b)
		_, _ = noise.Read(b) // never fails
	}
	return buffers, free, nil
}
