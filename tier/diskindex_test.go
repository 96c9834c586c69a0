package tier

import (
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

func TestDiskIndexAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type file struct{ stamp, bytes int64 }
		x := newDiskIndex()
		files, held := map[chunk.Key]file{}, map[chunk.Key]int{}
		key := rapid.Custom(func(t *rapid.T) chunk.Key { return shelfKey(rapid.IntRange(0, 12).Draw(t, "n")) })
		stamp := rapid.Int64Range(0, 40)
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				k := key.Draw(t, "key")
				if _, there := files[k]; there {
					return
				}
				files[k] = file{stamp.Draw(t, "stamp"), 512 * rapid.Int64Range(0, 9).Draw(t, "blocks")}
				x.add(k, files[k].stamp, 1, files[k].bytes)
			},
			"remove": func(t *rapid.T) {
				k := key.Draw(t, "key")
				if e := x.find(k); e != nil {
					x.remove(e)
				}
				delete(files, k)
			},
			"touch": func(t *rapid.T) {
				k, s := key.Draw(t, "key"), stamp.Draw(t, "stamp")
				if f, there := files[k]; there {
					x.touch(x.find(k), s)
					f.stamp = max(f.stamp, s)
					files[k] = f
				}
			},
			"hold": func(t *rapid.T) {
				k := key.Draw(t, "key")
				x.hold(k)
				held[k]++
			},
			"unhold": func(t *rapid.T) {
				k := key.Draw(t, "key")
				x.unhold(k)
				held[k] = max(held[k]-1, 0)
			},
			"": func(t *rapid.T) {
				var bytes int64
				oldest := int64(-1)
				for k, f := range files {
					bytes += f.bytes
					e := x.find(k)
					require.NotNil(t, e)
					require.Equal(t, k, e.key)
					require.Equal(t, f.stamp, e.stamp)
					if held[k] == 0 && (oldest < 0 || f.stamp < oldest) {
						oldest = f.stamp
					}
				}
				require.Equal(t, bytes, x.bytes)
				require.Len(t, x.byKey, len(files))
				if e := x.oldest(); oldest < 0 {
					require.Nil(t, e)
				} else {
					require.Equal(t, oldest, e.stamp)
					require.Zero(t, held[e.key])
				}
			},
		})
	})
}

func TestDiskIndexIsSmallAndFast(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(diskEntry{}), uintptr(72))
	const n = 200_000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	x := newDiskIndex()
	for i := range n {
		x.add(shelfKey(i), int64(i), disktest.FileBytes, disktest.FileBytes)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	per := float64(after.HeapAlloc-before.HeapAlloc) / n
	require.Less(t, per, 200.0, "bytes for each chunk")
	t.Logf("%.0f bytes for each chunk", per)
	runtime.KeepAlive(x)
}

func BenchmarkDiskHas(b *testing.B) {
	s := &Store{breaker: newBreaker(BreakerOptions{}), now: time.Now}
	d := &Disk{s: s, dir: newNamespaceDir("/", "m", ""), layout: &chunk.Layout{FileBytes: disktest.FileBytes}}
	keys := make([]chunk.Key, 1<<17)
	for i := range keys {
		keys[i] = shelfKey(i)
		d.dir.index.add(keys[i], int64(i), disktest.FileBytes, disktest.FileBytes)
	}
	b.ResetTimer()
	for i := 0; b.Loop(); i++ {
		if !d.Has(keys[i*7919%len(keys)]) {
			b.Fatal("lost")
		}
	}
}
