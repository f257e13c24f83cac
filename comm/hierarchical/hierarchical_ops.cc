#include "comm/hierarchical/hierarchical_ops.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "base/status.h"
#include "base/torch/tensor_over.h"

// Why it is so. A sum in rank order crosses hosts, so ranks wait for messages
// of others that wait in turn. That ends because all take windows, and the
// stops of a window, in one order: the earliest step that is not done can
// always be done. A receive that is started when it is needed would have its
// sender wait (Gloo sends nothing that is not asked for), so messages start
// kAhead windows before; a send waits for ranks that are not there yet, so it
// ends kBehind windows later.
//
// Messages of a kind between two ranks share a tag: their order tells them
// apart. It holds the signature: ranks in other collectives exchange nothing.
namespace tessera {
namespace {

using Message = GlooMessages::Message;
using shm::Window;

constexpr int64_t kAhead = 2;
constexpr int64_t kBehind = 2;

enum class Kind : uint32_t { kPartial, kContribution, kSum, kGathered };

uint32_t TagOf(uint32_t signature, Kind kind) {
  return (signature + static_cast<uint32_t>(kind) * 0x9e3779b1u) & 0x7fffffff;
}

// What both operations share: windows, and the messages that are under way.
class Operation {
 public:
  virtual ~Operation() = default;

 protected:
  Operation(const HostGroup& group, const SlicedCall& call)
      : group_(group),
        placement_(*group.placement),
        exchange_(*group.exchange),
        call_(call),
        host_(placement_.host_of(group.rank)),
        layout_(call.slices) {}

  shm::Collective New() const {
    shm::Collective collective = shm::Exchange::New(
        call_.op, call_.what, call_.type,
        (call_.slices.back().begin + call_.slices.back().bytes) /
            ElementBytes(call_.type));
    collective.post.root = call_.root;
    exchange_.SetRows(&collective, call_.data, layout_.row_bytes());
    collective.fine = true;
    return collective;
  }

  // Starts the messages of window `number`, and keeps those that nothing waits
  // for in the window itself.
  virtual absl::Status Start(int64_t number) = 0;

  // To be called when `window` is begun.
  absl::Status Advance(const Window& window) {
    window_bytes_ = window.bytes;
    const int64_t number = NumberOf(window);
    const int64_t end =
        std::min(number + kAhead + 1, layout_.NumWindows(window_bytes_));
    for (; started_ < end; ++started_) {
      later_.emplace_back();
      TESSERA_RETURN_IF_ERROR(Start(started_));
    }
    while (retired_ + kBehind < number) TESSERA_RETURN_IF_ERROR(Retire());
    return absl::OkStatus();
  }
  absl::Status Retire() {
    TESSERA_RETURN_IF_ERROR(group_.messages->WaitAll(later_.front()));
    later_.pop_front();
    ++retired_;
    return absl::OkStatus();
  }
  absl::Status Finish() {
    while (!later_.empty()) TESSERA_RETURN_IF_ERROR(Retire());
    return absl::OkStatus();
  }

  int64_t NumberOf(const Window& window) const {
    return window.begin / window.bytes;
  }
  // Messages of window `number` that are waited for after it.
  std::vector<Message>& LaterOf(int64_t number) {
    return later_[number - retired_];
  }
  Message Send(at::Tensor t, int peer, Kind kind) {
    return group_.messages->Send(std::move(t), peer,
                                 TagOf(call_.signature, kind));
  }
  Message Receive(at::Tensor t, int peer, Kind kind) {
    return group_.messages->Receive(std::move(t), peer,
                                    TagOf(call_.signature, kind));
  }
  at::Tensor DataOf(const Piece& piece) const {
    return BytesOver(call_.data + piece.begin, piece.bytes);
  }
  int OwnerOf(const Piece& piece) const {
    return layout_.slices()[piece.slice].owner;
  }

  const HostGroup& group_;
  const HostPlacement& placement_;
  shm::Exchange& exchange_;
  const SlicedCall& call_;
  const int host_;
  const Layout layout_;
  int64_t window_bytes_ = 0;

 private:
  int64_t started_ = 0;
  int64_t retired_ = 0;
  std::deque<std::vector<Message>> later_;  // of windows from retired_ on
};

class Sum : public Operation {
 public:
  Sum(const HostGroup& group, const SlicedCall& call, char* out)
      : Operation(group, call),
        out_(out),
        wide_(call.type == ElementType::kFloat16 ||
              call.type == ElementType::kBFloat16),
        partial_bytes_(wide_ ? 2 : 1) {
    for (int h = 0; h < placement_.num_hosts(); ++h) {
      plans_.push_back(PlanSum(placement_, h, partial_bytes_));
      longest_plan_ = std::max(longest_plan_, plans_.back().size());
    }
  }

  absl::Status Run() {
    shm::Collective collective = New();
    collective.read = [this](const Window& window) -> absl::Status {
      TESSERA_RETURN_IF_ERROR(Advance(window));
      for (Job& job : jobs_.front()) {
        TESSERA_RETURN_IF_ERROR(Fold(&job, window));
      }
      jobs_.pop_front();
      return absl::OkStatus();
    };
    TESSERA_RETURN_IF_ERROR(exchange_.Run(&collective));
    return Finish();
  }

 private:
  // One stop of the sum of one piece.
  struct Step {
    Piece piece;
    const std::vector<Stop>* plan;
    size_t number;
    const Stop& stop() const { return (*plan)[number]; }
    bool last() const { return number + 1 == plan->size(); }
  };
  // A step of this rank.
  struct Job {
    Step step;
    at::Tensor before;                      // the sum so far
    std::vector<at::Tensor> contributions;  // of ranks elsewhere, by rank
    std::vector<Message> arrivals;          // of both
  };

  // Who takes it. A complete sum on its owner's host is the owner's own work.
  int LaneOf(const Step& step, size_t number) const {
    const int host = (*step.plan)[number].host;
    const int owner = OwnerOf(step.piece);
    if (number + 1 == step.plan->size() && host == placement_.host_of(owner)) {
      return owner;
    }
    return placement_.Lane(host, step.piece.turn);
  }

  absl::Status Start(int64_t number) override {
    const std::vector<Piece> pieces = layout_.PiecesOf(number, window_bytes_);
    jobs_.emplace_back();
    for (size_t s = 0; s < longest_plan_; ++s) {
      for (const Piece& piece : pieces) {
        const std::vector<Stop>& plan =
            plans_[placement_.host_of(OwnerOf(piece))];
        if (s >= plan.size()) continue;
        TESSERA_RETURN_IF_ERROR(StartStep({piece, &plan, s}, &LaterOf(number)));
      }
    }
    return absl::OkStatus();
  }

  absl::Status StartStep(const Step& step, std::vector<Message>* later) {
    const Piece& piece = step.piece;
    const int lane = LaneOf(step, step.number);
    if (lane == group_.rank) return StartOwn(step);
    if (step.stop().host == host_) return absl::OkStatus();
    if (step.stop().first <= group_.rank && group_.rank < step.stop().end) {
      later->push_back(Send(DataOf(piece), lane, Kind::kContribution));
    }
    if (step.last() && OwnerOf(piece) == group_.rank) {
      later->push_back(
          Receive(BytesOver(OutOf(piece), piece.bytes), lane, Kind::kSum));
    }
    return absl::OkStatus();
  }

  absl::Status StartOwn(const Step& step) {
    const int64_t bytes = step.piece.bytes;
    Job job{step, {}, {}, {}};
    if (step.number > 0) {
      TESSERA_ASSIGN_OR_RETURN(job.before, Take(bytes * partial_bytes_));
      job.arrivals.push_back(
          Receive(job.before, LaneOf(step, step.number - 1), Kind::kPartial));
    }
    for (int r = step.stop().first; r < step.stop().end; ++r) {
      job.contributions.emplace_back();
      if (placement_.host_of(r) == host_) continue;
      TESSERA_ASSIGN_OR_RETURN(job.contributions.back(), Take(bytes));
      job.arrivals.push_back(
          Receive(job.contributions.back(), r, Kind::kContribution));
    }
    jobs_.back().push_back(std::move(job));
    return absl::OkStatus();
  }

  absl::Status Fold(Job* job, const Window& window) {
    const Step& step = job->step;
    TESSERA_RETURN_IF_ERROR(group_.messages->WaitAll(job->arrivals));
    std::vector<const void*> sources;
    if (step.number > 0 && !wide_) {
      sources.push_back(job->before.const_data_ptr());
    }
    for (int r = step.stop().first; r < step.stop().end; ++r) {
      const at::Tensor& sent = job->contributions[r - step.stop().first];
      if (sent.defined()) {
        sources.push_back(sent.const_data_ptr());
        continue;
      }
      const char* row;
      int64_t bytes;
      TESSERA_RETURN_IF_ERROR(exchange_.Row(
          placement_.local_rank_of(r), step.piece.row, window, &row, &bytes));
      sources.push_back(row + step.piece.place);
    }
    const bool mine = step.last() && OwnerOf(step.piece) == group_.rank;
    at::Tensor sum;
    if (!mine) {
      TESSERA_ASSIGN_OR_RETURN(
          sum, Take(step.piece.bytes * (step.last() ? 1 : partial_bytes_)));
    }
    Add(*job, sources, mine ? OutOf(step.piece) : sum.mutable_data_ptr());
    if (!mine) Pass(step, std::move(sum), window);
    return absl::OkStatus();
  }

  void Add(const Job& job, const std::vector<const void*>& sources,
           void* out) const {
    const int num_sources = static_cast<int>(sources.size());
    const int64_t numel = job.step.piece.bytes / ElementBytes(call_.type);
    if (!wide_) {
      return ReduceInOrder(call_.type, ReduceOp::kSum, out, sources.data(),
                           num_sources, numel);
    }
    PartialSumInOrder(call_.type,
                      job.before.defined() ? static_cast<const float*>(
                                                 job.before.const_data_ptr())
                                           : nullptr,
                      sources.data(), num_sources, job.step.last(), out, numel);
  }

  void Pass(const Step& step, at::Tensor sum, const Window& window) {
    const int to =
        step.last() ? OwnerOf(step.piece) : LaneOf(step, step.number + 1);
    LaterOf(NumberOf(window))
        .push_back(Send(std::move(sum), to,
                        step.last() ? Kind::kSum : Kind::kPartial));
  }

  char* OutOf(const Piece& piece) const {
    return out_ + piece.begin - layout_.slices()[piece.slice].begin;
  }
  absl::StatusOr<at::Tensor> Take(int64_t bytes) const {
    return group_.buffers->Take(bytes, window_bytes_ * partial_bytes_);
  }

  char* const out_;
  const bool wide_;  // partial sums are in float32
  const int partial_bytes_;
  std::vector<std::vector<Stop>> plans_;  // by the owner's host
  size_t longest_plan_ = 0;
  std::deque<std::vector<Job>> jobs_;  // of the windows begun and not done
};

class Gather : public Operation {
 public:
  Gather(const HostGroup& group, const SlicedCall& call)
      : Operation(group, call) {}

  absl::Status Run() {
    shm::Collective collective = New();
    collective.bare = true;
    collective.results = true;
    collective.read = [this](const Window& window) { return Provide(window); };
    collective.read_results = [this](const Window& window) {
      return ReadOthers(window);
    };
    TESSERA_RETURN_IF_ERROR(exchange_.Run(&collective));
    return Finish();
  }

 private:
  // From whom the ranks of this host read a piece: its owner, or the one to
  // which the owner sends it.
  int ProviderOf(const Piece& piece) const {
    const int owner = OwnerOf(piece);
    return placement_.host_of(owner) == host_
               ? owner
               : placement_.Lane(host_, piece.turn);
  }

  absl::Status Start(int64_t number) override {
    arrivals_.emplace_back();
    for (const Piece& piece : layout_.PiecesOf(number, window_bytes_)) {
      const int owner = OwnerOf(piece);
      if (owner == group_.rank) {
        for (int i = 1; i < placement_.num_hosts(); ++i) {
          const int host = (host_ + i) % placement_.num_hosts();
          LaterOf(number).push_back(Send(DataOf(piece),
                                         placement_.Lane(host, piece.turn),
                                         Kind::kGathered));
        }
      } else if (ProviderOf(piece) == group_.rank) {
        arrivals_.back().push_back(
            Receive(DataOf(piece), owner, Kind::kGathered));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Provide(const Window& window) {
    TESSERA_RETURN_IF_ERROR(Advance(window));
    TESSERA_RETURN_IF_ERROR(group_.messages->WaitAll(arrivals_.front()));
    arrivals_.pop_front();
    if (IsDirect(exchange_.rank())) return absl::OkStatus();
    for (const Piece& piece : PiecesOf(window)) {
      if (ProviderOf(piece) != group_.rank) continue;
      std::memcpy(StagedAt(exchange_.rank(), piece, window),
                  call_.data + piece.begin, piece.bytes);
    }
    return absl::OkStatus();
  }

  absl::Status ReadOthers(const Window& window) {
    for (const Piece& piece : PiecesOf(window)) {
      const int provider = ProviderOf(piece);
      if (provider == group_.rank) continue;
      const int peer = placement_.local_rank_of(provider);
      TESSERA_RETURN_IF_ERROR(exchange_.WaitForResult(peer, window));
      const char* from = StagedAt(peer, piece, window);
      if (IsDirect(peer)) {
        const char* row;
        int64_t bytes;
        TESSERA_RETURN_IF_ERROR(
            exchange_.Row(peer, piece.row, window, &row, &bytes));
        from = row + piece.place;
      }
      std::memcpy(call_.data + piece.begin, from, piece.bytes);
    }
    return absl::OkStatus();
  }

  std::vector<Piece> PiecesOf(const Window& window) const {
    return layout_.PiecesOf(NumberOf(window), window.bytes);
  }
  bool IsDirect(int peer) const {
    return exchange_.PostOf(peer).direct_offset >= 0;
  }
  char* StagedAt(int peer, const Piece& piece, const Window& window) const {
    return exchange_.ResultSlot(peer, window) + piece.row * window.bytes +
           piece.place;
  }

  std::deque<std::vector<Message>> arrivals_;  // of windows not begun
};

}  // namespace

absl::Status SumSlices(const HostGroup& group, const SlicedCall& call,
                       char* out) {
  return Sum(group, call, out).Run();
}

absl::Status GatherSlices(const HostGroup& group, const SlicedCall& call) {
  return Gather(group, call).Run();
}

}  // namespace tessera
