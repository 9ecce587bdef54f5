/* Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's is used. */
(() => {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    /* storage is switched off: the system's colours it is */
  }
})();
