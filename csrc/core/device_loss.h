// GPUs that this process has lost. After some errors (an illegal address, a failed launch, ECC), every further call on
// the device's context fails until the process ends. This record makes such calls unnecessary.
#pragma once

#include <string>

namespace dyno {

// Keeps the first reason given for a device. It becomes the message of every DeviceLostError of that device.
void mark_device_lost(int ordinal, const std::string& reason);
// The reason that the device was lost; empty if it was not.
std::string device_loss(int ordinal);
bool any_device_lost() noexcept;
// Throws DeviceLostError if this process has lost the device. Does not call the driver.
void check_not_lost(int ordinal);

}  // namespace dyno
