#include "kvtier.hpp"

// Nothing else: the header has to bring what it needs.
int hpp_alone()
{
    return KVT_OK;
}
