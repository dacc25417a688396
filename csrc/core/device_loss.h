// GPUs that this process has lost. After some errors (an illegal address, a failed launch, ECC) every further call on
// the device's context fails until the process ends. The knowledge here spares those calls: they need not even be made.
#pragma once

#include <string>

namespace dyno {

// The first reason given for a device stays; it becomes the message of every DeviceLostError of it.
void mark_device_lost(int ordinal, const std::string& reason);
// That message; empty where the device is not lost.
std::string device_loss(int ordinal);
bool any_device_lost() noexcept;
// Throws DeviceLostError when an earlier error has cost this process the device. Asks nothing of the driver.
void check_not_lost(int ordinal);

}  // namespace dyno
