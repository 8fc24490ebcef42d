// Loaded before anything is painted, so that a chosen theme does not flash in.
document.documentElement.dataset.theme = localStorage.getItem("foreglance.theme") ?? "system";
