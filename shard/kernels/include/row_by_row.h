#pragma once

// Not 0: compute row by row. For all models of a process. Set it before the first forward pass.
extern int caravan_row_by_row;
