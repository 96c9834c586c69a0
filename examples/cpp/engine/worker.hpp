// A rank: it owns pages, and does what the coordinator plans.
#ifndef ENGINE_WORKER_HPP
#define ENGINE_WORKER_HPP

#include <memory>
#include <string>

#include "kvtier.hpp"
#include "pages.hpp"
#include "plan.hpp"

namespace engine {

constexpr int patience_ms = 120000; // for whatever must come on the slowest machine

// What all processes of one life of the engine know.
struct setting {
    topology shape;
    std::string root;  // of the cache
    std::string group; // this life of the engine
    std::uint32_t blocks; // of the page pool
};

// Opens the cache: rank 0 may lead, the others look for a leader.
kvtier::cache open_cache(const setting &s, std::uint32_t rank);

class worker {
public:
    worker(kvtier::cache &cache, const setting &s, std::uint32_t rank);

    // Waits until the leader has heard of all ranks and accepted them, and lets the
    // cache prove itself on this rank's pages.
    void ready();
    // Never throws: what goes wrong stands in the outcome.
    outcome carry_out(const plan &p);

private:
    void store(const plan &p);
    void load(const plan &p);

    kvtier::cache &cache_;
    topology shape_;
    pages pages_;
    kvtier::rank rank_; // after pages_: it ends first
};

// The loop of a rank in a process of its own: one plan after the other, until the
// coordinator is gone.
void serve(const setting &s, std::uint32_t rank, const channel &coordinator);

} // namespace engine

#endif
