// The coordinator: it looks prompts up, gets slots, and plans what the ranks do.
#ifndef ENGINE_PLANNER_HPP
#define ENGINE_PLANNER_HPP

#include <array>
#include <vector>

#include "worker.hpp"

namespace engine {

// What one load or store came to, over all ranks.
struct result {
    double seconds = 0; // of the slowest rank
    finding found;
};

class planner {
public:
    // own is the rank of this process, peers are the others. All outlive the planner.
    planner(kvtier::cache &cache, const setting &s, worker &own, const std::vector<channel> &peers);

    // Waits until all ranks are accepted.
    void start();

    // How many leading chunks of the prompt the cache has, all of them in DRAM now.
    std::uint32_t look_up(const prompt_spec &p);
    // Runs the model over the tokens [first, end) on all ranks.
    void forward(const prompt_spec &p, std::uint32_t first, std::uint32_t end, std::uint32_t spoil);
    // Stores the chunks [first, end), which the pages hold.
    result store(const prompt_spec &p, std::uint32_t first, std::uint32_t end);
    // Loads the tokens [first, end) into wiped pages; every rank compares all of them.
    result load(const prompt_spec &p, std::uint32_t first, std::uint32_t end);
    // Waits until everything is on disk.
    void flush();

private:
    plan make(step what, const prompt_spec &p) const;
    std::vector<kvtier::key> keys_of(const prompt &p) const;
    result all_ranks(const plan &p);
    void grants(const std::vector<kvtier::key> &keys, std::uint32_t first, std::uint32_t end, plan *p);

    kvtier::cache &cache_;
    const setting &setting_;
    worker &own_;
    const std::vector<channel> &peers_;
    kvtier::coordinator coordinator_;
    kvtier::key root_{};
    std::uint64_t next_ = 1; // operation or lease
};

} // namespace engine

#endif
