// Measures how fast samples come out of a token file: its bytes are widened to
// int64, or to int32, and checked against the vocabulary, batch after batch.
// Results are ratios to a plain read of the same mapped samples, the sum of its
// 64-bit words, and to a memcpy of its bytes. All run on one thread over the
// file's pages, which are in memory by then, in turns of some 1 MiB each, so
// that other load on the machine affects all of them; each is a quarter of the
// file ahead of the one before, so that none finds in a cache what another has
// read. Time is the thread's own processor time: nothing here waits. Batches
// are always written to the same buffer.
//
//   benchmarks/data --mib=512 --seq_len=1024 --batch=8 --rounds=9 [--shuffle]
//
// It prints medians of the rounds, in GB of the file a second, and the medians
// of their ratios with minimum and maximum.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/bits.h"
#include "base/isa.h"
#include "base/status.h"
#include "benchmarks/program.h"
#include "data/text/token_corpus.h"

ABSL_FLAG(int64_t, mib, 512, "size of the file");
ABSL_FLAG(int64_t, seq_len, 1024, "tokens of a sample, less one");
ABSL_FLAG(int64_t, batch, 8, "samples of a batch");
ABSL_FLAG(int64_t, rounds, 9, "of which medians are printed");
ABSL_FLAG(bool, shuffle, false, "samples in a random order");
ABSL_FLAG(std::string, folder, "/tmp", "where the file is written");

namespace tessera {
namespace {

uint64_t g_sum = 0;  // so that the compiler leaves nothing out

__attribute__((target("avx2"))) uint64_t SumAvx2(const uint64_t* words,
                                                 size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

uint64_t SumPortable(const uint64_t* words, size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

// Reads bytes [begin, begin + bytes) of the file; a rest of less than 8 is left
// out.
void PlainRead(absl::Span<const uint8_t> bytes, size_t begin, size_t count) {
  begin = begin / 8 * 8;
  const auto* words = reinterpret_cast<const uint64_t*>(bytes.data() + begin);
  g_sum += BestIsa() == Isa::kPortable ? SumPortable(words, count / 8)
                                       : SumAvx2(words, count / 8);
}

absl::Status WriteFile(const std::string& path, int64_t mib) {
  std::ofstream file(path, std::ios::binary);
  std::vector<uint64_t> words(1 << 17);
  uint64_t next = 0;
  for (int64_t i = 0; i < mib; ++i) {
    // Bits 31 and 63 are zero, so that words of 32 bits fit in int32.
    for (uint64_t& word : words) word = MixBits(++next) & 0x7FFFFFFF7FFFFFFF;
    file.write(reinterpret_cast<const char*>(words.data()), 1 << 20);
  }
  if (file.flush()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
}

constexpr int kWays = 4;
constexpr const char* kWayNames[kWays] = {"read", "copy", "int64", "int32"};

int64_t MaxInt32Token(TokenType type) {
  return std::min<int64_t>(MaxToken(type), (int64_t{1} << 31) - 1);
}

// Measures one type of tokens, in one way after the other.
class Measurement {
 public:
  Measurement(const TokenCorpus* corpus, TokenType type)
      : corpus_(*corpus),
        bytes_(corpus->files()[0].bytes()),
        seq_len_(absl::GetFlag(FLAGS_seq_len)),
        sample_bytes_(static_cast<size_t>(seq_len_ * TokenBytes(type))),
        batch_(static_cast<size_t>(absl::GetFlag(FLAGS_batch))) {
    order_.resize(static_cast<size_t>(corpus->num_samples(seq_len_)) / batch_ *
                  batch_);
    for (size_t i = 0; i < order_.size(); ++i) {
      order_[i] = static_cast<int64_t>(i);
    }
    if (absl::GetFlag(FLAGS_shuffle)) {
      for (size_t i = order_.size() - 1; i > 0; --i) {
        std::swap(order_[i], order_[MixBits(i) % (i + 1)]);
      }
    }
    wide_.resize(batch_ * (static_cast<size_t>(seq_len_) + 1));
    narrow_.resize(wide_.size());
  }

  bool empty() const { return order_.empty(); }
  double gigabytes() const {
    return static_cast<double>(order_.size() * sample_bytes_) / 1e9;
  }

  // Returns the seconds of each way over the whole file.
  absl::StatusOr<std::array<double, kWays>> Round() {
    std::array<double, kWays> seconds = {};
    const size_t batches = order_.size() / batch_;
    const size_t turn =
        std::max<size_t>(1, (size_t{1} << 20) / (sample_bytes_ * batch_));
    for (size_t first = 0; first < batches; first += turn) {
      const size_t last = std::min(batches, first + turn);
      for (int way = 0; way < kWays; ++way) {
        const double start = SecondsOf(CLOCK_THREAD_CPUTIME_ID);
        for (size_t i = first; i < last; ++i) {
          TESSERA_RETURN_IF_ERROR(
              Batch(way, (i + way * batches / kWays) % batches));
        }
        seconds[way] += SecondsOf(CLOCK_THREAD_CPUTIME_ID) - start;
      }
    }
    return seconds;
  }

 private:
  absl::Status Batch(int way, size_t number) {
    const absl::Span<const int64_t> indices =
        absl::MakeConstSpan(order_).subspan(number * batch_, batch_);
    g_sum += static_cast<uint64_t>(wide_[0] + narrow_[0]);
    if (way == 2) {
      return corpus_.CopySamples(indices, seq_len_, absl::MakeSpan(wide_));
    }
    if (way == 3) {
      return corpus_.CopySamples(indices, seq_len_, absl::MakeSpan(narrow_));
    }
    for (size_t i = 0; i < batch_; ++i) {
      const size_t begin = static_cast<size_t>(indices[i]) * sample_bytes_;
      if (way == 0) {
        PlainRead(bytes_, begin, sample_bytes_);
      } else {
        std::memcpy(
            reinterpret_cast<uint8_t*>(wide_.data()) + i * sample_bytes_,
            bytes_.data() + begin, sample_bytes_);
      }
    }
    return absl::OkStatus();
  }

  const TokenCorpus& corpus_;
  const absl::Span<const uint8_t> bytes_;
  const int64_t seq_len_;
  const size_t sample_bytes_, batch_;
  std::vector<int64_t> order_, wide_;
  std::vector<int32_t> narrow_;
};

absl::Status Measure(const std::string& path, TokenType type) {
  TESSERA_ASSIGN_OR_RETURN(
      const TokenCorpus corpus,
      TokenCorpus::OpenFiles({path}, {type, MaxInt32Token(type) + 1}));
  Measurement measurement(&corpus, type);
  if (measurement.empty()) {
    return absl::InvalidArgumentError("the file has less than a batch");
  }
  std::array<std::vector<double>, kWays> rates, ratios;
  // The first round reads the pages; it is not counted.
  for (int64_t round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {
    TESSERA_ASSIGN_OR_RETURN(const auto seconds, measurement.Round());
    if (round < 0) continue;
    for (size_t way = 0; way < kWays; ++way) {
      rates[way].push_back(measurement.gigabytes() / seconds[way]);
      ratios[way].push_back(seconds[0] / seconds[way]);
    }
  }
  std::cout << absl::StreamFormat("%-6s  read %5.2f GB/s", TokenTypeName(type),
                                  Median(rates[0]));
  for (int way = 1; way < kWays; ++way) {
    const auto [least, largest] =
        std::minmax_element(ratios[way].begin(), ratios[way].end());
    std::cout << absl::StreamFormat("  %s %5.2f, %.2f (%.2f to %.2f) of it",
                                    kWayNames[way], Median(rates[way]),
                                    Median(ratios[way]), *least, *largest);
  }
  std::cout << "\n";
  return absl::OkStatus();
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "the speed of token files; see benchmarks/data.cc");
  TESSERA_RETURN_IF_ERROR(ReadFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(
      AtLeast(1, FLAGS_mib, FLAGS_seq_len, FLAGS_batch, FLAGS_rounds));
  const std::string path =
      absl::StrCat(absl::GetFlag(FLAGS_folder), "/tokens.", getpid());
  const auto remover = absl::MakeCleanup([&] { unlink(path.c_str()); });
  TESSERA_RETURN_IF_ERROR(WriteFile(path, absl::GetFlag(FLAGS_mib)));
  std::cout << absl::GetFlag(FLAGS_mib) << " MiB, seq_len "
            << absl::GetFlag(FLAGS_seq_len) << ", batches of "
            << absl::GetFlag(FLAGS_batch) << ", "
            << (absl::GetFlag(FLAGS_shuffle) ? "shuffled" : "in order") << ", "
            << IsaName(BestIsa()) << "\n";
  for (const TokenType type :
       {TokenType::kUint8, TokenType::kUint16, TokenType::kUint32}) {
    TESSERA_RETURN_IF_ERROR(Measure(path, type));
  }
  return g_sum == 0 ? absl::InternalError("nothing was read")
                    : absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::EndOf("data", tessera::Run(argc, argv));
}
