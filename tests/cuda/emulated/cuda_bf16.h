// No emulated kernel computes with bfloat16.
#pragma once
