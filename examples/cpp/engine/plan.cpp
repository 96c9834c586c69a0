#include "plan.hpp"

namespace engine {

void plan::write(message &m) const
{
    m.put(what).put(prompt).put(first).put(end).put(spoil).put(op).put(session).put(first_ordinal);
    m.put_all(grants).put_all(verdicts).put_all(table);
}

plan plan::read(message &m)
{
    plan p;
    m.get(p.what).get(p.prompt).get(p.first).get(p.end).get(p.spoil).get(p.op).get(p.session).get(p.first_ordinal);
    m.get_all(p.grants).get_all(p.verdicts).get_all(p.table);
    return p;
}

void outcome::write(message &m) const
{
    m.put_all(error).put(seconds).put(found.checked).put(found.touched).put_all(found.wrong).put_all(found.first);
}

outcome outcome::read(message &m)
{
    outcome o;
    m.get_all(o.error).get(o.seconds).get(o.found.checked).get(o.found.touched).get_all(o.found.wrong).get_all(o.found.first);
    return o;
}

} // namespace engine
