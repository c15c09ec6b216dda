// Which of the steps that threads can make now have to be explored.
//
// Two steps of different threads are independent when each way round they lead to the same state. Here one
// half of that is enough: a store into a word that nobody else stores to may come before any load of it,
// because a load may read what is old, and the views of the two threads come out the same. So the store need
// not be tried after the load. But the load has to be tried after the store as well: it has one more to read.
// Hence what a thread's next step depends on:
//   load      on stores to the word by others (and RMWs, which store)
//   store     on stores to it by others; a seq_cst one also on seq_cst loads by others, which must not miss
//   it. A
//             compare-exchange that fails counts as a store: before the other's it would not have failed
//   futex     wait, wake and stores to the word depend on each other
//   await     that cannot go on: on stores to what it has looked at; a join: on the threads that it waits for
// A set of threads is closed when it has, with each thread, all those that may still make a step on which the
// thread's next one depends. Then no sequence of steps by threads outside changes what those inside can do,
// nor what they do: the set is persistent (Godefroid), and to explore the steps of its threads alone loses no
// deadlock and no step of any thread that some execution makes. That a thread fails, and which accesses race,
// does not depend on the order of independent steps. State spaces have no cycles but those of threads that
// look again without having read anything newer; from every state of such a cycle another step leads out, and
// is explored.
//
// What threads may still do is what the shape has learnt of the program over all executions:
//   - in which way each thread accesses a word, and up to which phase (joins passed) it stores;
//   - rivals: which threads have made a conflicting access after this one's, without happening after it.
//   Where the
//     order of the two is always the same because the program sees to it (as with the flag of the next round,
//     which its writer raises only after the reader has answered), the one cannot depend on the other. Kept
//     by the moment of the access: the phase, and how many stores the word had.
// If a search meets anything that is not in the shape, its result does not count and it starts anew
// (search.cpp); so the last one has used a shape that holds in all executions. Suppose not: let `a` be a
// thread's next step in some state, and `w b` steps of others, the first of which that is in conflict with
// `a`, against the shape, is `b`. The search went on with `a`; there `w b` is possible too, as `w` is
// independent of `a` and neither thread knows of the other. What comes after `a` is explored completely (by
// induction: the state space ends). So the search has met `b` after `a`, not ordered behind it, and has put
// that into the shape: a contradiction.
//
// Waits. A loop that looks and yields does the same with every look but for what it reads (this is asked of
// the program: a look that fails leaves nothing behind but counts). So a look that failed although it could
// have read something newer, then or later, adds nothing: the execution in which it comes late enough to read
// that is explored too, as loads may be put off. It is cut there. What remains of failed looks are those of
// threads that wait in the end: deadlocks, and deadlines that pass when nobody can move (looks that came
// before such a deadline are kept). That needs to know where a look begins: in the function that yields,
// which for a kernel is that of the wait (`await`, for bodies, does not know, and looks again instead).
#pragma once

#include <vector>

#include "execution.h"

namespace explorer {

// The steps to explore: those of a smallest persistent set that was found; of all threads, without `reduces`.
// False: the execution is redundant.
bool steps_to_explore(bool reduces, std::vector<Transition>& steps);

}  // namespace explorer
