// Which of the steps that threads can make now have to be explored.
//
// Two steps of different threads are independent when each way round they lead to the same state. Here one
// half of that is enough: a store into a word that nobody else stores to may come before any load of it,
// because a load may read what is old, and the views of the two threads come out the same. So the store need
// not be tried after the load. But the load has to be tried after the store as well: it has one more to read.
// Hence what a thread's next step depends on:
//   load      on stores to the word by others (and RMWs, which store)
//   store     on stores to it by others; a seq_cst one also on seq_cst loads by others, which must not miss
//   it futex     wait, wake and stores to the word depend on each other await     that cannot go on: on
//   stores to what it has looked at; a join: on the threads that it waits for
// A set of threads is closed when it has, with each thread, all those that may still make a step on which the
// thread's next one depends. Then no sequence of steps by threads outside changes what those inside can do,
// nor what they do: the set is persistent (Godefroid), and to explore the steps of its threads alone loses no
// deadlock and no step of any thread that some execution makes. That a thread fails, and which accesses race,
// does not depend on the order of independent steps. State spaces have no cycles but those of threads that
// look again without having read anything newer; from every state of such a cycle another step leads out, and
// is explored.
//
// What a thread may still do is what the shape has learnt of it: for stores with the phase (joins passed) of
// the last one. If a search meets anything that is not in the shape, its result does not count and it starts
// anew (search.cpp); so the last one has used a shape that holds in all executions. (Suppose not: the first
// step that the shape lacks, in some execution, comes after steps that are all in it; of these the search has
// explored an equivalent sequence, and would have met it.)
#pragma once

#include <vector>

#include "execution.h"

namespace explorer {

// The steps to explore: those of a smallest persistent set that was found; of all threads, without `reduces`.
// False: the execution is redundant.
bool steps_to_explore(bool reduces, std::vector<Transition>& steps);

}  // namespace explorer
