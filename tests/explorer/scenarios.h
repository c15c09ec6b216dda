#pragma once

#include "world.h"

namespace scenario {

std::unique_ptr<explorer::Program> make_a2a(const explorer::Arguments& given);
std::unique_ptr<explorer::Program> make_query(const explorer::Arguments& given);
std::unique_ptr<explorer::Program> make_kv(const explorer::Arguments& given);

}  // namespace scenario
