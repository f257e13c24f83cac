// Times by hand: rates are round numbers.
#include "engine/plan/step_time.h"

#include "gtest/gtest.h"
#include "sharding/trace/trace.h"
#include "sharding/trace/trace_log.h"

namespace tessera {
namespace {

using Kind = TraceEvent::Kind;

Rates RoundRates() {
  Rates rates;
  rates.flops_per_second = 1000;
  rates.half_flops_per_second = 2000;
  rates.bytes_per_second = 100;
  rates.seconds_per_operator = 0.5;
  rates.all_gather = {1, 0.1};
  rates.reduce_scatter = {2, 0.2};
  rates.all_reduce = {3, 0.4};
  rates.gather = {4, 0.05};
  rates.exposed = 0.5;
  rates.gather_exposed = 0.25;
  return rates;
}

TraceEvent Operator(int64_t flops, int64_t moved, bool backward) {
  TraceEvent event;
  event.kind = Kind::kOperator;
  event.backward = backward;
  event.flops = flops;
  event.moved_bytes = moved;
  return event;
}

TEST(StepTimeTest, AnOperatorTakesWhatIsLonger) {
  Trace trace;
  trace.operators = {"aten::mm"};
  trace.events = {Operator(4000, 100, false), Operator(1000, 300, true)};
  trace.events.push_back({Kind::kTouch, true, 0, 0});
  trace.backward = 1;
  // 4 of flops, 3 of bytes, and 0.5 for each.
  EXPECT_DOUBLE_EQ(ComputeSeconds(trace, RoundRates(), /*half=*/false), 8);
  EXPECT_DOUBLE_EQ(ComputeSeconds(trace, RoundRates(), /*half=*/true), 6);
}

TEST(StepTimeTest, ADiskIsHiddenByTheRest) {
  Rates rates = RoundRates();
  const OffloadTraffic traffic = {100, 60};
  EXPECT_EQ(OffloadSeconds(traffic, 0, rates), 0);  // of no known disk
  rates.disk_read_per_second = 10;
  rates.disk_written_per_second = 20;
  EXPECT_DOUBLE_EQ(OffloadSeconds(traffic, 3, rates), 10 + 3 - 3);
  EXPECT_EQ(OffloadSeconds(traffic, 13, rates), 0);
}

TEST(StepTimeTest, CollectivesAreHiddenAsFarAsMeasured) {
  StepTraffic traffic;
  traffic.gathers = 2;
  traffic.gathered_bytes = 100;
  traffic.reductions = 3;
  traffic.reduced_bytes = 50;
  const double gathers = 2 * 4 + 100 * 0.05, sums = 3 * 2 + 50 * 0.2;
  const double during = gathers + sums;
  EXPECT_DOUBLE_EQ(CommunicationSeconds(traffic, 1000, RoundRates()),
                   gathers / 4 + sums / 2);
  // What lasts longer than computing is not hidden by it.
  EXPECT_DOUBLE_EQ(CommunicationSeconds(traffic, 5, RoundRates()), during - 5);
  traffic.overlaps = false;
  EXPECT_DOUBLE_EQ(CommunicationSeconds(traffic, 1000, RoundRates()), during);
  traffic.publications = 1;
  traffic.published_bytes = 10;
  EXPECT_DOUBLE_EQ(CommunicationSeconds(traffic, 1000, RoundRates()),
                   during + 2);
  traffic.all_reduces = true;
  EXPECT_DOUBLE_EQ(CommunicationSeconds(traffic, 1000, RoundRates()),
                   gathers + 3 * 3 + 50 * 0.4 + 2);
}

TEST(StepTimeTest, OverANetworkEachRankSendsAllButItsPart) {
  const Rates rates = OverNetwork(RoundRates(), 4, 1000, 0.25);
  EXPECT_DOUBLE_EQ(rates.all_gather.Of(4000), 3 * 0.25 + 3);
  EXPECT_DOUBLE_EQ(rates.reduce_scatter.Of(4000), 3 * 0.25 + 3);
  EXPECT_DOUBLE_EQ(rates.all_reduce.Of(4000), 6 * 0.25 + 6);
  EXPECT_DOUBLE_EQ(rates.gather.Of(4000), 3 * 0.25 + 3);
  EXPECT_EQ(rates.exposed, 0);
  EXPECT_EQ(rates.gather_exposed, 0);
  const Rates more = AtWorldSize(rates, 8);
  EXPECT_DOUBLE_EQ(more.all_gather.Of(8000), 7 * 0.25 + 7);
  EXPECT_DOUBLE_EQ(more.all_reduce.Of(8000), 14 * 0.25 + 14);
  EXPECT_DOUBLE_EQ(more.gather.Of(8000), 7 * 0.25 + 7);
  EXPECT_EQ(AtWorldSize(RoundRates(), 8).all_gather.Of(10), 2);
  EXPECT_EQ(rates.flops_per_second, 1000);
}

}  // namespace
}  // namespace tessera
