// A session's decisions and results as Python values: its plan, its ops, entries of profiles, captured graphs.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "plan/auto_place.h"
#include "runtime/session.h"

namespace dyno {

// The expected time of a u-batch. `measured`: (device, op key, rows, seconds per launch).
plan::PlanCost session_cost(const runtime::Session& session, const plan::Load& load,
                            const std::vector<plan::NamedRates>& rates,
                            const std::vector<std::tuple<std::string, std::string, int64_t, double>>& measured);
nanobind::dict plan_dict(const runtime::Session& session);
// Throws PlanError for a number of tokens outside the u-batch.
nanobind::list ops_list(const runtime::Session& session, std::optional<int64_t> tokens,
                        std::optional<int64_t> sequences);
// Every launch of every op list with its operands, see node_report.cpp.
nanobind::list node_list(const runtime::Session& session);
nanobind::list kernel_report(const runtime::Session& session);
nanobind::list capture_list(const std::vector<runtime::CaptureReport>& captures);

}  // namespace dyno
