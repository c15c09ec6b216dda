// A wrong execution in words, and as a line that brings it back.
#pragma once

#include <string>

#include "search.h"

namespace explorer {

// "FATE:THREAD.OP.OPTION,...": the thread runs up to that step of its own, and takes that option there (until
// then the newest value, and no fault). Counts of steps and not of choices, so that it holds in any shape.
std::string write_path(int fate, const Path& path);
bool read_path(const std::string& text, int& fate, Path& path);

// Runs that execution again, to its end. `prints`: each step that another thread can see, on stderr.
Wrong replay(const Program& program, const Options& options, int fate, const Path& path, bool prints);

}  // namespace explorer
