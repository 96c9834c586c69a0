// What the coordinator tells the ranks in each step, and what they answer: the
// metadata that an engine sends anyway.
#ifndef ENGINE_PLAN_HPP
#define ENGINE_PLAN_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "channel.hpp"
#include "kvtier.h"
#include "model.hpp"
#include "pages.hpp"

namespace engine {

// How a prompt is made; every process makes it for itself.
struct prompt_spec {
    std::uint32_t tokens = 0, shared = 0, seed = 0;
    prompt make() const { return prompt(tokens, shared, seed); }
};

enum class step : std::uint32_t {
    forward = 1, // compute the tokens [first, end)
    store,       // copy granted chunks out of the pages
    load,        // bring the tokens [first, end) into wiped pages, and compare
};

struct plan {
    step what = step::forward;
    prompt_spec prompt;
    std::uint32_t first = 0, end = 0;
    std::uint32_t spoil = no_token; // forward: this token gets a wrong byte
    std::uint64_t op = 0, session = 0;
    std::uint32_t first_ordinal = 0;     // store
    std::vector<kvt_grant> grants;       // store
    std::vector<kvt_verdict> verdicts;   // load
    std::vector<std::uint32_t> table;    // blocks of the prompt

    static constexpr std::uint32_t no_token = 0xffffffffu;
    void write(message &m) const;
    static plan read(message &m);
};

struct outcome {
    std::string error; // empty: done
    double seconds = 0; // of the copy
    finding found;     // load

    void write(message &m) const;
    static outcome read(message &m);
};

} // namespace engine

#endif
