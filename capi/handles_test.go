package main

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type parent struct{ n int }
type child struct{ n int }

// A handle names what it was given out for, until it is taken, and nothing after,
// however often its place in the table is used again.
func TestHandlesAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		handles = handleTable{}
		live := map[uint64]any{}
		owner := map[uint64]uint64{}
		var ever []uint64
		pick := func() uint64 {
			if len(ever) == 0 || rapid.Bool().Draw(t, "invented") {
				return rapid.Uint64().Draw(t, "handle")
			}
			return rapid.SampledFrom(ever).Draw(t, "handle")
		}
		n := 0
		t.Repeat(map[string]func(*rapid.T){
			"parent": func(t *rapid.T) {
				n++
				h, ok := handles.put(&parent{n}, 0)
				require.True(t, ok)
				require.NotContains(t, ever, h)
				require.NotZero(t, h)
				ever = append(ever, h)
				live[h] = n
			},
			"child": func(t *rapid.T) {
				n++
				o := pick()
				if o == 0 {
					return // no owner
				}
				h, ok := handles.put(&child{n}, o)
				_, alive := live[o]
				require.Equal(t, alive, ok)
				if !ok {
					return
				}
				require.NotContains(t, ever, h)
				ever = append(ever, h)
				live[h], owner[h] = -n, o
			},
			"object": func(t *rapid.T) {
				h := pick()
				p, errParent := object[*parent](h)
				c, errChild := object[*child](h)
				switch want, alive := live[h]; {
				case !alive:
					require.ErrorIs(t, errParent, errHandle)
					require.ErrorIs(t, errChild, errHandle)
				case want.(int) > 0:
					require.Equal(t, want, p.n)
					require.ErrorIs(t, errChild, errHandle)
				default:
					require.Equal(t, want, -c.n)
					require.ErrorIs(t, errParent, errHandle)
				}
			},
			"take": func(t *rapid.T) {
				h := pick()
				_, wrong := take[*handleTable](h)
				require.ErrorIs(t, wrong, errHandle)
				_, err := take[any](h)
				_, alive := live[h]
				require.Equal(t, alive, err == nil)
				delete(live, h)
			},
			"owned": func(t *rapid.T) {
				o := pick()
				var want []uint64
				for h := range live {
					if owner[h] == o && o != 0 {
						want = append(want, h)
					}
				}
				if o != 0 {
					require.ElementsMatch(t, want, handles.owned(o))
				}
			},
		})
	})
}
