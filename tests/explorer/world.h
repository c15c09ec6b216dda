// What the scenarios share: regions whose words have names, threads by rank and channel, the end of a call,
// and what must hold after a fault.
//
// Arguments of every scenario:
//   ranks, channels   how many. one_thread=1: the channels (and lanes) of a rank share a thread
//   lanes             how many; more than one have a channel each, and threads that do not meet
//   start             epoch of the last round before the first one (the wrap is at 2^32)
//   sleep=1           waiting threads sleep on their doorbells at once, and do not yield
//   deaths            set of ranks of which one may stop for ever, at any step. lost=1: sockets tell of it,
//                     and leave=1: also of ranks that have made all their calls
//   early             how many deadlines may pass although the peer can still go on
//   forever=1         no deadlines; time still passes, so that hosts are polled
//   unordered=1       stores of two threads to one word need no order: what comes of it must show otherwise
//   interrupt=1       Ctrl-C may end a wait of rank 0
#pragma once

#include <climits>
#include <cmath>
#include <string>
#include <vector>

#include "explorer.h"
#include "host/call.h"
#include "host/region.h"

namespace scenario {

using namespace dcp;
namespace core = dcp::DCP_NS;

// Longer than a timeout and than the time between two looks at the host.
inline constexpr int64_t kTimeout = 100'000'000, kJump = 1'000'000'000;

struct Shape {
  int num_ranks, num_channels, num_lanes, num_streams;
  bool one_thread, sleeps, lost, leave, forever, unordered, interrupt;
  uint64_t start_epoch, mortal;
  int num_early;

  Shape(const explorer::Arguments& given, int streams)
      : num_ranks(int(given.get("ranks", 2))),
        num_channels(int(given.get("channels", 1))),
        num_lanes(int(given.get("lanes", 1))),
        num_streams(streams * num_lanes),
        one_thread(given.get("one_thread", 0) != 0),
        sleeps(given.get("sleep", 0) != 0),
        lost(given.get("lost", 0) != 0),
        leave(given.get("leave", 0) != 0),
        forever(given.get("forever", 0) != 0),
        unordered(given.get("unordered", 0) != 0),
        interrupt(given.get("interrupt", 0) != 0),
        start_epoch(uint64_t(given.get("start", 3))),
        mortal(uint64_t(given.get("deaths", 0))),
        num_early(int(given.get("early", 0))) {}

  bool has_faults() const { return mortal != 0 || num_early != 0 || interrupt; }
  int threads_of_rank() const { return one_thread ? 1 : num_channels * num_lanes; }
  int threads_of_call() const { return one_thread ? 1 : num_channels; }
  ControlLayout control() const {
    const uint64_t stream_bytes =
        sizeof(StreamState) + uint64_t(num_channels) * (sizeof(ChannelState) + sizeof(Doorbell));
    const uint64_t flags_bytes = uint64_t(2) * num_channels * num_ranks * sizeof(Flag);
    return {0, 64, stream_bytes, 64 + num_streams * stream_bytes, flags_bytes, num_streams, num_channels};
  }
  uint64_t control_bytes() const { return control().flags_offset + num_streams * control().flags_bytes; }
};

// The name of a byte of the control words.
std::string control_name(const Shape& shape, size_t offset);

// What one rank keeps between its calls, beside its region.
struct RankState {
  int32_t status[4];  // [channel] of the call in flight
  int32_t buffer_idx, handed_out, last_used, has_left;
  uint64_t num_nonfinite;
  uint64_t cause;  // the poison word, when a call had failed
};

class World : public explorer::Program {
 public:
  World(const explorer::Arguments& given, int num_streams) : shape_(given, num_streams) {}

  explorer::Options options() const override;
  void run(int thread) const override;
  void check_end() const override;

 protected:
  // The script of one thread, of a channel or of a lane: it makes its rank's calls, one after the other, up
  // to the first fault.
  virtual void run_rank(int rank, int thread) const = 0;

  // A region for every rank: control words, then `payload_bytes`, whose bytes `payload_name` names.
  void make_regions(uint64_t payload_bytes, const std::function<std::string(size_t)>& payload_name);

  SymmView symm(int rank) const { return {bases_.data(), rank, shape_.num_ranks}; }
  WaitPolicy policy(int rank) const;
  RankState& state(int rank, int lane = 0) const { return states_[rank * shape_.num_lanes + lane]; }

  // All channels of a call, by all threads of the rank: prepare() by one of them, then run(launch) by each,
  // then finish(status) by the first one. True when the call had no fault.
  template <class Prepare, class Run, class Finish>
  bool call(RankState& mine, int channel, const Prepare& prepare, const Run& run,
            const Finish& finish) const {
    if (channel == 0) prepare();
    meet();
    const Launch launch = {channel, shape_.one_thread ? shape_.num_channels : channel + 1, nullptr};
    mine.status[channel] = int32_t(run(launch));
    meet();
    Status status = Status::kOk;
    for (int c = 0; c < shape_.threads_of_call(); ++c) {
      if (Status(mine.status[c]) != Status::kOk) status = Status(mine.status[c]);
    }
    if (status == Status::kOk && races_are_doubts_ && explorer::has_doubt()) {
      explorer::fail("race", "a call trusts what it read while another rank was writing there");
    }
    if (channel == 0) finish(status);
    return status == Status::kOk;
  }
  // After a call of `rank` that had a fault: whether it may have had one, and whether the record is right.
  void check_fault(int rank, const char* what) const;

  const Shape shape_;
  // What a fault must be, where every run ends with one; kNone: those that the arguments allow.
  FaultKind expected_ = FaultKind::kNone;
  // A deadline ends a wait that nothing else ends, though nothing goes wrong.
  bool has_deadlines_ = false;
  // After a fault callers may write where a late peer still reads: it must not trust that.
  bool races_are_doubts_ = false;

 private:
  struct Poll {
    const World* world;
    int rank;
  };
  static void poll_host(void* context, HostEvents* events);
  // Lanes have no order between each other.
  void meet() const {
    if (shape_.num_lanes == 1 || shape_.one_thread) explorer::join();
  }

  std::vector<uint64_t> bases_;
  std::vector<Poll> polls_;
  RankState* states_ = nullptr;
};

// One digit of a decimal number with `num_digits`, the first one leading.
inline int digit(int64_t number, int num_digits, int index) {
  for (int i = index + 1; i < num_digits; ++i) number /= 10;
  return int(number % 10);
}
inline int num_digits(int64_t number) {
  int num = 1;
  while (number /= 10) ++num;
  return num;
}

}  // namespace scenario
