#include "report.hpp"

#include <iomanip>
#include <map>
#include <sstream>

namespace engine {
namespace {

std::string json_of(const topology &t)
{
    return "{\"D\": " + std::to_string(t.d) + ", \"I\": " + std::to_string(t.i) + ", \"TP\": " + std::to_string(t.tp) + "}";
}

std::string quoted(const std::string &text)
{
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\')
            out += '\\';
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + "\"";
}

double rate(double bytes, double seconds) { return seconds > 0 ? bytes / seconds / 1e9 : 0; }

} // namespace

void report::add(chapter c) { chapters_.push_back(std::move(c)); }

std::vector<passage> report::passages() const
{
    std::vector<passage> out;
    for (std::size_t n = 0; n < chapters_.size(); n++) {
        const chapter &to = chapters_[n];
        std::map<std::size_t, passage> by_writer;
        for (std::size_t p = 0; p < to.accounts.size(); p++) {
            const account &a = to.accounts[p];
            for (std::uint32_t chunk = 0; chunk < a.held; chunk++) {
                std::size_t writer = to.wrote[p].at(chunk);
                if (writer == n)
                    continue; // of the same life, by the other prompt
                passage &x = by_writer.try_emplace(writer, passage{chapters_[writer].shape, to.shape}).first->second;
                x.chunks++;
                x.bytes_equal = x.bytes_equal && a.found.wrong.at(chunk) == 0 && a.found.touched == 0;
            }
        }
        for (const auto &[writer, x] : by_writer)
            out.push_back(x);
    }
    return out;
}

std::vector<std::string> report::complaints() const
{
    std::vector<std::string> out;
    for (const chapter &c : chapters_) {
        for (std::size_t p = 0; p < c.accounts.size(); p++) {
            const account &a = c.accounts[p];
            std::string where = c.shape.text() + ", prompt " + std::to_string(p + 1) + ": ";
            std::uint64_t wrong = 0;
            for (std::uint64_t n : a.found.wrong)
                wrong += n;
            if (a.held != c.expected[p])
                out.push_back(where + std::to_string(a.held) + " chunks were there instead of " + std::to_string(c.expected[p]));
            if (wrong > 0)
                out.push_back(where + std::to_string(wrong) + " wrong bytes in two loads; the first: " + a.found.first);
            if (a.found.touched > 0)
                out.push_back(where + std::to_string(a.found.touched) + " bytes outside the loaded tokens were touched");
        }
    }
    return out;
}

void report::print_newest(std::ostream &out) const
{
    const chapter &c = chapters_.back();
    account sum;
    std::uint32_t stored = 0;
    for (std::size_t p = 0; p < c.accounts.size(); p++) {
        const account &a = c.accounts[p];
        sum.held += a.held;
        sum.found.checked += a.found.checked;
        sum.loaded_bytes += a.loaded_bytes;
        sum.load_seconds += a.load_seconds;
        sum.stored_bytes += a.stored_bytes;
        sum.store_seconds += a.store_seconds;
        stored += static_cast<std::uint32_t>(c.wrote[p].size()) - a.held;
    }
    out << "life " << chapters_.size() << ", " << std::left << std::setw(12) << c.shape.text() << std::right << std::fixed << std::setprecision(2);
    out << "  loaded " << std::setw(3) << sum.held << " chunks";
    if (sum.held > 0)
        out << " at " << rate(sum.loaded_bytes, sum.load_seconds) << " GB/s, compared " << std::setprecision(1) << double(sum.found.checked) / (1 << 20)
            << " MiB" << std::setprecision(2);
    out << ", stored " << stored;
    if (stored > 0)
        out << " at " << rate(sum.stored_bytes, sum.store_seconds) << " GB/s";
    out << ", killed\n" << std::flush;
}

void report::print(std::ostream &out) const
{
    out << "\nchunks that one topology stored and another one loaded:\n";
    for (const passage &x : passages())
        out << "  " << std::left << std::setw(12) << x.from.text() << " -> " << std::setw(12) << x.to.text() << std::right << std::setw(4) << x.chunks
            << " chunks, " << (x.bytes_equal ? "every byte equal" : "BYTES DIFFER") << "\n";
    for (const std::string &line : complaints())
        out << line << "\n";
}

std::string report::json() const
{
    std::ostringstream out;
    out << "{\"reshard\": [";
    const char *comma = "\n ";
    for (const passage &x : passages()) {
        out << comma << "{\"from\": " << json_of(x.from) << ", \"to\": " << json_of(x.to) << ", \"chunks\": " << x.chunks
            << ", \"bytes_equal\": " << (x.bytes_equal ? "true" : "false") << "}";
        comma = ",\n ";
    }
    out << "],\n \"complaints\": [";
    comma = "";
    for (const std::string &line : complaints()) {
        out << comma << quoted(line);
        comma = ", ";
    }
    out << "]}\n";
    return out.str();
}

} // namespace engine
