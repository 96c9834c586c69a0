#include "topology.hpp"

#include <cstdio>

namespace engine {

std::optional<topology> parse_topology(const std::string &text)
{
    topology t;
    int used = 0;
    if (std::sscanf(text.c_str(), "D%u,I%u,TP%u%n", &t.d, &t.i, &t.tp, &used) != 3 ||
        static_cast<std::size_t>(used) != text.size())
        return std::nullopt;
    bool power_of_two = t.tp != 0 && (t.tp & (t.tp - 1)) == 0; // so that heads divide evenly
    if (t.d == 0 || t.i == 0 || !power_of_two || t.tp > 16 || t.tp % t.d != 0 || block_tokens % t.i != 0)
        return std::nullopt;
    return t;
}

} // namespace engine
