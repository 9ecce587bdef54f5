"""How people begin requests, what they ask about a passage, and how they go on: questions start from these."""

# What is asked about a passage, which stands behind it. Answers quote it, and that is to be drafted, too.
INSTRUCTIONS = (
    "Summarize the following text in a few sentences.",
    "Summarize the following article.",
    "Summarize:",
    "Rewrite the following text in simpler words.",
    "List the key points of this text.",
    "Translate the following text into German.",
    "Translate the following text into French.",
    "Translate the following text into Spanish.",
    "Translate this into English.",
    "What is the main idea of the text below? Quote the sentences that show it.",
    "Continue the following text.",
    "Correct the spelling and grammar of this text, and change nothing else.",
    "Answer this question from the text below: what is said about its subject, and why does it matter?",
    "Write a title for this text, and repeat its first sentence.",
    "Turn the following text into a dialogue between two people.",
    "Extract all names, numbers and terms from this text.",
    "Extract the facts from this text as JSON.",
)

# What comes after an answer, in a second turn
FOLLOW_UPS = (
    "Rewrite your answer in half as many words.",
    "Explain that in more detail.",
    "Give me an example.",
    "Why?",
    "Can you say that in simpler words?",
    "Make a list of the most important points.",
    "Turn this into a short poem.",
    "Translate your answer into Spanish.",
    "Are you sure? Check it again, step by step.",
    "What are the disadvantages?",
    "Write the same as a formal letter.",
    "Now do it again, but in a different way.",
    "What should I do next?",
)

# The first words of questions, which the model completes
OPENINGS = (
    "Write a short story about", "Write a poem about", "Write an essay on", "Write a letter to",
    "Write an email to my", "Write a product description for", "Write a blog post about", "Write a review of",
    "Write a speech", "Write a recipe", "Write a Python function that", "Write a program in C++ that",
    "Write a SQL query", "Write a JavaScript function", "Write a script that reads", "Implement",
    "Fix the bug in this code:\n\n", "What does this code do?\n\ndef ", "Explain how", "Explain why",
    "Explain the difference between", "Explain the concept of", "Explain to a child", "Describe the", "Describe how",
    "Compare", "Discuss the", "Analyze the", "Define", "Outline", "Summarize the history", "What is the capital",
    "What is the difference", "What is", "What are the main", "What are", "What does", "What was", "What happens",
    "What year", "What would", "What causes", "What kind of", "Who was", "Who is the", "Who wrote", "Who played",
    "Who invented", "Who won", "Who sang", "When did", "When was", "When is", "Where is", "Where did", "Where was",
    "Where does the", "How many", "How much", "How do I", "How does", "How can I", "How did", "How long", "How to",
    "How old", "Why is", "Why do", "Why did", "Which", "Is it", "Can you", "Could you please", "Should I", "Does",
    "Do you", "Tom has", "Sarah bought", "John and Mary", "A farmer has", "A train travels", "A store sells",
    "There are", "If a", "In a class of", "Emily earns $", "A box contains", "Mike is", "James runs",
    "Every day, Anna", "It takes", "Solve for x:", "Solve the equation", "Calculate the", "Find the", "Prove that",
    "Simplify", "Given that", "Convert", "The sum of", "A rectangle has", "The price of", "What is the probability",
    "What is the value of", "Translate German to English: Die", "Translate German to English: Der",
    "Translate German to English: Es", "Translate German to English: In", "Translate English to French:",
    "Translate the following sentence into Spanish:", "Translate to English:", "Translate into German:",
    "How do you say", "Give me a list of", "Give me ideas for", "Give three", "List five", "List the", "Name",
    "Suggest", "Recommend", "Create a", "Create a table", "Make a plan", "Generate", "Design a", "Plan a", "Draft a",
    "Compose a", "Pretend", "Act as", "You are a", "Imagine", "Suppose", "Tell me about", "Tell me a", "Tell me how",
    "I want to", "I need help with", "I have a", "I am", "My", "Help me", "Please", "Hi", "Hello,", "Thanks",
    "Classify the", "Evaluate the following", "Extract the", "Identify the", "Rewrite the sentence:", "Rewrite",
    "Correct the following", "Complete the", "Edit the following", "Convert the following", "Answer the question:",
    "Read the following", "Based on the", "Given the following", "Consider", "Choose", "True or false:", "Q:",
)  # fmt: skip
