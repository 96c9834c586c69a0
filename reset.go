package kvtier

import "crypto/rand"

// Reset begins a new epoch, after weights were replaced: the 16 random bytes are a
// prefix-wide extra of all later keys, whose chunks the caller stores with NoDisk.
// Nothing is deleted. The epoch is good also with an error, which says that there is no
// leader; one in another process is told in the background. It does not wait.
func (k *Coordinator) Reset() (epoch [16]byte, err error) {
	rand.Read(epoch[:]) // never fails
	l, _, err := k.m.attached()
	if err != nil {
		return epoch, err
	}
	return epoch, l.reset(epoch[:])
}
