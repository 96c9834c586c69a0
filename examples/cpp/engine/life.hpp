// One life of the engine: its rank processes, from their start to their death.
#ifndef ENGINE_LIFE_HPP
#define ENGINE_LIFE_HPP

#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "plan.hpp"
#include "worker.hpp"

namespace engine {

// What a life does with a prompt: it loads and compares what the cache has of it, then
// computes and stores more of it.
struct task {
    prompt_spec prompt;
    std::uint32_t until = 0; // chunks that are to be stored afterwards
    std::uint32_t spoil = plan::no_token; // this token gets a wrong byte before it is stored
};

// What became of it.
struct account {
    std::uint32_t held = 0; // leading chunks that were there
    finding found;          // in all of them, over all loads and ranks
    double loaded_bytes = 0, load_seconds = 0, stored_bytes = 0, store_seconds = 0;
};

// The rank processes. They are killed at the end, whatever happens.
class life {
public:
    // Starts this program again, once per rank. Rank 0 also leads and coordinates.
    life(const setting &s, const std::vector<task> &tasks);
    life(const life &) = delete;
    life &operator=(const life &) = delete;
    ~life() { kill(); }

    // Waits until all tasks are done.
    std::vector<account> run();
    // SIGKILL for all, and waits until they are gone.
    void kill() noexcept;

private:
    std::vector<pid_t> pids_;
    std::optional<channel> reports_;
};

// What a started process does: nothing when argv is not that of one. Else the exit
// status.
std::optional<int> run_as_rank(int argc, char **argv);

} // namespace engine

#endif
