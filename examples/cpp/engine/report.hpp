// What the lives of the engine came to, for people and for programs.
#ifndef ENGINE_REPORT_HPP
#define ENGINE_REPORT_HPP

#include <ostream>
#include <string>
#include <vector>

#include "life.hpp"

namespace engine {

// One life, and of which earlier ones the chunks were that it found.
struct chapter {
    topology shape;
    std::vector<account> accounts;               // by prompt
    std::vector<std::vector<std::size_t>> wrote; // by prompt and chunk: the chapter that stored it
    std::vector<std::uint32_t> expected;         // by prompt: chunks that had to be there
};

// Chunks that one life stored and another one loaded under its own topology.
struct passage {
    topology from, to;
    std::uint32_t chunks = 0;
    bool bytes_equal = true;
};

class report {
public:
    void add(chapter c);

    // Every pair of lives between which chunks passed, in order.
    std::vector<passage> passages() const;
    // Empty when all is well; else what is not, in words.
    std::vector<std::string> complaints() const;

    // A line for the newest life.
    void print_newest(std::ostream &out) const;
    void print(std::ostream &out) const;
    std::string json() const;

private:
    std::vector<chapter> chapters_;
};

} // namespace engine

#endif
