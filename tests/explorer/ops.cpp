// The explorations of the shipped ops.
#include "scenarios.h"

int main(int argc, char** argv) {
  return explorer::run_main(
      argc, argv,
      {{"a2a", &scenario::make_a2a}, {"query", &scenario::make_query}, {"kv", &scenario::make_kv}});
}
