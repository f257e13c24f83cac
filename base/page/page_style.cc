#include "base/page/page_style.h"

#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

// Series have the colours of Okabe and Ito, which the colour-blind can tell
// apart, too, a little lighter on a dark background.
constexpr char kStyle[] = R"(
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1d2430;--soft:#5b6472;
--grid:#e3e6eb;--axis:#9aa3b0;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#7fb8dc;
--c4:#cc79a7;--c5:#e69f00;--c6:#8a8f98;--c7:#6a51a3;--c8:#b8a900}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--card:#1d2128;--ink:#e6e9ee;
--soft:#a0a8b5;--grid:#2e343e;--axis:#6b7482;--c0:#4aa8e0;--c1:#ff8a3d;--c2:#2fc79a;
--c3:#2f6f99;--c4:#e39cc4;--c5:#f5bd3d;--c6:#a4aab4;--c7:#a48fd8;--c8:#e0d34a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1320px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:19px;margin:32px 0 12px}
h3{font-size:15px;margin:20px 0 8px}a{color:var(--c0)}
.soft,.unit{color:var(--soft);font-weight:400}.facts{margin:4px 0;overflow-wrap:anywhere}
.state{display:inline-block;border:1px solid;border-radius:12px;padding:1px 10px;margin-right:8px}
.tiles{display:grid;grid-template-columns:repeat(var(--all),1fr);gap:12px;margin:18px 0}
.tile,.chart,.card{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:12px 14px;margin:0;min-width:0}
.tile b{display:block;font-size:21px;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:13px}
.grid2{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.chart figcaption{font-weight:600;overflow-wrap:anywhere}
.wide,.row{grid-column:1/-1}
.plot{position:relative;height:210px;margin:40px 12px 44px 64px;font-size:12px;color:var(--soft)}
.wide .plot{height:290px}
.plot svg,.bars svg{position:absolute;left:0;top:0;width:100%;height:100%}
.plot svg{overflow:visible}
.plot span{position:absolute;white-space:nowrap;line-height:1}
.plot .y{right:100%;margin-right:8px;transform:translateY(-50%)}
.plot .x{top:100%;margin-top:9px;transform:translateX(-50%)}
.plot .yl{left:-56px;bottom:100%;margin-bottom:20px}
.plot .xl{right:0;top:100%;margin-top:28px}
.plot .mark{bottom:100%;margin-bottom:3px;transform:translateX(-50%);color:var(--ink)}
.plot .phase{top:100%;margin-top:6px;height:20px;padding:4px 0 0 4px;overflow:hidden;background:var(--grid);border:1px solid var(--axis);color:var(--ink)}
.phased{margin-bottom:76px}.phased .x{margin-top:34px}.phased .xl{margin-top:54px}
svg *{vector-effect:non-scaling-stroke}
svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--axis)}
svg .cut{stroke:var(--ink);stroke-dasharray:4 3;opacity:.6}
svg polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
svg .over{stroke:var(--ink)}svg .p{fill:none;stroke-linecap:round;stroke-width:5}
svg .big{stroke-width:8}svg .hole{stroke:var(--card);stroke-width:4}
.h rect{fill:transparent}.h:hover rect{fill:var(--ink);fill-opacity:.1}
.h path{opacity:0}.h:hover path{opacity:1}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0;padding:0;font-size:13px}
.key.over{background:var(--ink)}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.legend b{font-variant-numeric:tabular-nums}
.bar{display:grid;grid-template-columns:74px 1fr 84px;gap:8px;font-size:13px;margin:10px 0;color:var(--soft)}
.bar span:first-child{text-align:right}.bars{position:relative;height:30px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
td,th{padding:4px 12px;text-align:right;border-bottom:1px solid var(--grid)}
th{color:var(--soft);font-weight:600}td.name,th.name{text-align:left;overflow-wrap:anywhere}
.scroll{overflow-x:auto}pre{overflow:auto;margin:8px 0 0;font:13px/1.45 ui-monospace,monospace}
.note{color:var(--soft);border-left:3px solid var(--c5);padding-left:10px}
summary{cursor:pointer;font-weight:600}details{margin-top:8px}.facts+.chart{margin-top:14px}
@media (max-width:1100px){.tiles{grid-template-columns:repeat(var(--half),1fr)}
.tile:last-child{grid-column:span var(--rest)}}
@media (max-width:760px){main{padding:12px}.grid2{grid-template-columns:minmax(0,1fr)}
.tiles{grid-template-columns:repeat(2,1fr);gap:8px}
.tile,.chart,.card{padding:10px}.plot,.wide .plot{height:190px}td,th{padding:4px 8px}}
)";

std::string Colors() {
  std::string css;
  for (int i = 0; i < kPageColors; ++i) {
    absl::StrAppend(&css, ".s", i, "{stroke:var(--c", i, ")}.f", i,
                    "{fill:var(--c", i, ")}.b", i, "{background:var(--c", i,
                    ")}");
  }
  return css;
}

}  // namespace

std::string PageHead(absl::string_view title) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\" "
      "xmlns=\"http://www.w3.org/1999/xhtml\"><head><meta charset=\"utf-8\"/>"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"/>"
      "<title>",
      title, "</title>\n<style>", kStyle, Colors(),
      "</style></head><body><main>\n");
}

int MemoryKindColor(absl::string_view kind) {
  // Those that lie on each other have colours that differ in their lightness.
  constexpr absl::string_view kKinds[kPageColors] = {
      "parameters", "gradients", "working",       "optimizer", "activations",
      "temporary",  "other",     "communication", "tensors"};
  for (int i = 0; i < kPageColors; ++i) {
    if (kKinds[i] == kind) return i;
  }
  return 6;
}

}  // namespace tessera
