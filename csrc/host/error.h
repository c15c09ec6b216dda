// Programming mistakes: what the Python layer should have seen to. User mistakes are found in
// dcpkernels/_check.py, with the user's words for things; nothing is checked twice.
#pragma once

#include <stdexcept>
#include <string>

namespace dcp {

[[noreturn]] inline void check_failed(const char* condition, const char* file, int line,
                                      const std::string& given) {
  throw std::logic_error("dcpkernels internal: must hold: " + std::string(condition) + " (got " + given +
                         ") at " + file + ":" + std::to_string(line));
}

}  // namespace dcp

// DCP_CHECK(rank < num_ranks, rank): the value that broke the rule is in the text.
#define DCP_CHECK(condition, given)                                                               \
  do {                                                                                            \
    if (!(condition)) ::dcp::check_failed(#condition, __FILE__, __LINE__, std::to_string(given)); \
  } while (0)
